"""Worker that trains in torch with the usual code: module, loss, ``backward``, ``torch.optim.SGD``.

``python -m benchmarks.train_step.eager FOLDER THREADS [MODE]``. MODE is ``eager``, ``channels_last`` for images in that
layout, or ``compile`` for torch.compile of the forward and backward pass and of the optimizer.
:mod:`benchmarks.train_step.command` writes the folder. Idle is torch imported and nothing run: code that its optimizers and
kernels load on their first call belongs to the training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.repetition import serve
from benchmarks.torch_layers import to_torch_layers
from edgefl.errors import ModelError
from edgefl.models.losses import CrossEntropy
from edgefl.models.losses.as_torch import loss_as_torch
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.output_side.submodel import STRONG, OutputSide, tiers


def built(model: str, options: Mapping[str, Any], tier: str, length: int = 0) -> OutputSide:
    """Return the part of ``model`` that ``tier`` trains; ``strong`` is the whole of any model.

    Args:
        model: name in the zoo, or a factory.
        options: options of the model.
        tier: name of a tier.
        length: tokens of shortened samples; 0: whole samples.

    Raises:
        ModelError: there is no such model, option or tier.
    """
    presets = {"strong": STRONG} if tier == "strong" else tiers(model)
    if tier not in presets:
        raise ModelError(
            f"model {model!r} has no tier {tier!r}; choose one of: {', '.join(presets)}", tier=tier
        )
    spec = build_model(model, **options)
    return presets[tier].of(spec.shortened(length) if length else spec)


def read_batches(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that :func:`benchmarks.graphs.write_arrays` wrote, samples and labels."""
    files = [np.load(path) for path in sorted(folder.glob("batch*.npz"))]
    return [(torch.from_numpy(file["batch.0.x"]), torch.from_numpy(file["batch.0.y"])) for file in files]


def has_plain_labels(submodel: OutputSide) -> bool:
    """Return True if the loss is plain cross entropy with one label per sample, which other trainers support."""
    spec = submodel.spec
    return spec.loss == CrossEntropy() and spec.boundary(len(spec.units)).shape != (1,)


EAGER, CHANNELS_LAST, COMPILE = "eager", "channels_last", "compile"
LONGEST = 400
"""Longest text of a compiler's error, in characters."""


def optimizer(module: nn.Module, *, lr: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """Return SGD with decay on kernels only, like our algorithm."""
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
    """Return a function that makes one training step on the next batch."""
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
    """Return a step of the device's model on the device's batches, in a mode."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    submodel = built(job["model"], job["options"], job["tier"], job["length"])
    module: nn.Module = to_torch_layers(submodel.suffix)
    batches = read_batches(folder)
    if mode == CHANNELS_LAST:
        module, batches = channels_last(module, batches)
    make = compiled if mode == COMPILE else stepper
    return make(module, loss_as_torch(submodel.spec.loss), optimizer(module, **job["sgd"]), batches)


def channels_last(
    module: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return module and batches with the channels of images (B, C, H, W) and of kernels innermost in memory."""
    layout = torch.channels_last
    moved = module.to(memory_format=layout)  # type: ignore[call-overload]
    return moved, [(x.contiguous(memory_format=layout), y) for x, y in batches]


def compiled(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    sgd: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> Callable[[], object]:
    """Return :func:`stepper` through torch.compile, which compiles on the first step.

    A step raises SystemExit with one line if torch cannot compile.
    """
    forward = torch.compile(lambda x, y: loss(module(x), y), dynamic=False)
    step = _stepper(forward, sgd, torch.compile(sgd.step), batches)

    def one_line_step() -> float:
        try:
            return step()
        except Exception as error:
            raise SystemExit(f"torch.compile failed: {_one_line(error)}") from error

    return one_line_step


def _one_line(error: Exception) -> str:
    """Return the first paragraph of torch's message; the rest is advice to its developers."""
    paragraph = str(error).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(paragraph.split())}"[:LONGEST]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(lambda: load(Path(sys.argv[1]), *sys.argv[3:]))
