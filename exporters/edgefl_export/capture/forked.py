"""torch in a process that was forked from one that has imported it."""

from __future__ import annotations

import torch


def begin() -> None:
    """Compute with one thread, because those of the other process are not here.

    RuntimeError where the other process had computed a gradient: torch's autograd then works there only.
    """
    torch.set_num_threads(1)
    torch.ones(1, requires_grad=True).sum().backward()
