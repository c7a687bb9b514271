"""``torch.inference_mode`` as ``torch.no_grad``, which graphs can hold and which gives the same values and gradients."""

from __future__ import annotations

from typing import Any

import torch

from edgefl.models.swapped import Swap, heeding

_KEPT = "edgefl_grad_enabled"


def _enter(self: Any) -> None:
    # One object may be entered again inside of itself, as a decorator of a recursive function is.
    self.__dict__.setdefault(_KEPT, []).append(torch.is_grad_enabled())
    torch._C._set_grad_enabled(not self.mode)


def _leave(self: Any, *raised: Any) -> None:
    torch._C._set_grad_enabled(self.__dict__[_KEPT].pop())


_mode = torch.inference_mode
as_no_grad: Swap = Swap(
    (_mode, "__enter__", heeding(lambda: as_no_grad, _mode.__enter__, _enter)),
    (_mode, "__exit__", heeding(lambda: as_no_grad, _mode.__exit__, _leave)),
)
"""Inside, this thread's ``torch.inference_mode`` only switches gradients off."""
