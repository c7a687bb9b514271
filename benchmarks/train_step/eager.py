"""The worker that trains in torch as most people would: module, loss, ``backward``, ``torch.optim.SGD``.

``python -m benchmarks.train_step.eager FOLDER THREADS [MODE]``, where MODE is ``eager``, ``channels_last`` for images in
that layout, or ``compile`` for torch.compile of the forward and backward pass and of the optimizer. The folder is written by
:mod:`benchmarks.train_step.rows`.
Idle is torch imported and nothing run: what its optimizers and kernels load on their first call is what training takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.as_written import as_written
from benchmarks.common.worker import serve
from benchmarks.train_step.model import built, read_batches
from edgefl.models.losses.as_torch import loss_as_torch

EAGER, CHANNELS_LAST, COMPILE = "eager", "channels_last", "compile"
LONGEST = 400
"""Characters of a compiler's complaint."""


def optimizer(module: nn.Module, *, lr: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """SGD with decay on kernels only, as the algorithm has it."""
    tables = {
        id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    kernels = [p for p in module.parameters() if p.dim() >= 2 and id(p) not in tables]
    others = [p for p in module.parameters() if p.dim() < 2 or id(p) in tables]
    groups: list[dict[str, Any]] = [{"params": kernels, "weight_decay": weight_decay}, {"params": others}]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def stepper(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    sgd: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> Callable[[], object]:
    """One training step on the next batch."""
    return _stepper(lambda x, y: loss(module(x), y), sgd, sgd.step, batches)


def _stepper(
    forward: Callable[[Tensor, Tensor], Tensor],
    sgd: torch.optim.Optimizer,
    update: Callable[[], object],
    batches: list[tuple[Tensor, Tensor]],
) -> Callable[[], float]:
    data = cycle(batches)

    def step() -> float:
        x, y = next(data)
        sgd.zero_grad(set_to_none=True)
        value = forward(x, y)
        value.backward()
        update()
        return float(value.detach())

    return step


def load(folder: Path, mode: str = EAGER) -> Callable[[], object]:
    """The same model and the same batches as the device's, made and called as ``mode`` has it."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    submodel = built(job["model"], job["options"], job["tier"], job["length"])
    module: nn.Module = as_written(submodel.suffix)
    batches = read_batches(folder)
    if mode == CHANNELS_LAST:
        module, batches = channels_last(module, batches)
    make = compiled if mode == COMPILE else stepper
    return make(module, loss_as_torch(submodel.spec.loss), optimizer(module, **job["sgd"]), batches)


def channels_last(
    module: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The same values, with the channels of images (B, C, H, W) and of kernels innermost in memory."""
    layout = torch.channels_last
    moved = module.to(memory_format=layout)  # type: ignore[call-overload]
    return moved, [(x.contiguous(memory_format=layout), y) for x, y in batches]


def compiled(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    sgd: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> Callable[[], object]:
    """:func:`stepper` through torch.compile: the loss with its gradients, and the update. It compiles when it first runs.

    Each step raises SystemExit with one line where torch cannot compile.
    """
    forward = torch.compile(lambda x, y: loss(module(x), y), dynamic=False)
    step = _stepper(forward, sgd, torch.compile(sgd.step), batches)

    def told() -> float:
        try:
            return step()
        except Exception as error:
            raise SystemExit(f"torch.compile failed: {_one_line(error)}") from error

    return told


def _one_line(error: Exception) -> str:
    """Return the first paragraph of torch's message; the rest is advice to its developers."""
    paragraph = str(error).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(paragraph.split())}"[:LONGEST]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(lambda: load(Path(sys.argv[1]), *sys.argv[3:]))
