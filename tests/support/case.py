"""One module as a user would write it, its batches, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec

ROW = TensorSpec((8,))
Sample = TensorSpec | Mapping[str, TensorSpec]
Batch = dict[str, Tensor]
Expected = Literal["trains", "refused"]
Word = Literal["agrees", "refused", "wrong", "raised", "undecided"]


def mean_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Return the default loss of a classifier; a binary one where the model has a single logit."""
    if out.dim() == 1 or out.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(out.reshape(len(out)), y.to(out.dtype))
    return F.cross_entropy(out, y)


@dataclass(frozen=True)
class Case:
    """One module as a user would write it, and how it is trained.

    Attributes:
        name: unique name.
        kind: group of the corpus, such as ``a-mode``.
        expected: ``trains`` like torch, or ``refused`` with advice.
        make: returns the module with its modes, hooks and freezing; seeded, so that two calls return equal modules.
        sample: shape, dtype and range of one sample; by parameter name of forward where there are several inputs.
        classes: number of classes, 1 for targets that are numbers.
        loss: the argument ``loss`` of ``edgefl.compile``.
        loss_fn: the same loss in torch: (out, y) -> mean over the batch.
        labels: spec of one label; default: a class number.
        inputs: returns the rows of one input in place of random ones; default: normal floats, integers in their range.
        answers: returns the labels in place of random ones.
        output: selects the output among several values that forward returns, for torch.
    """

    name: str
    kind: str
    expected: Expected
    make: Callable[[], nn.Module] = field(repr=False)
    sample: Sample = ROW
    classes: int = 3
    loss: Any = None
    loss_fn: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
    labels: TensorSpec | None = None
    inputs: Callable[[torch.Generator, str, TensorSpec, int], Tensor] | None = None
    answers: Callable[[torch.Generator, int], Tensor] | None = None
    output: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True)
class Outcome:
    """Verdict on one case. ``tensor`` and ``error`` (relative to the largest update) of a wrong one."""

    word: Word
    message: str = ""
    tensor: str = ""
    error: float = 0.0

    def __str__(self) -> str:
        place = f" {self.tensor} off by {self.error:.3g}" if self.tensor else ""
        return f"{self.word}{place}{': ' + self.message if self.message else ''}"


def batches(case: Case, steps: int, batch: int) -> list[tuple[Batch, Tensor]]:
    """Return the inputs by name and the labels of each step; each batch holds every class it has room for."""
    generator = torch.Generator().manual_seed(20)
    specs = case.sample if isinstance(case.sample, Mapping) else {"x": case.sample}
    return [
        (
            {name: _rows(case, generator, name, spec, batch) for name, spec in specs.items()},
            _labels(case, generator, batch),
        )
        for _ in range(steps)
    ]


def _rows(case: Case, generator: torch.Generator, name: str, spec: TensorSpec, rows: int) -> Tensor:
    if case.inputs is not None:
        return case.inputs(generator, name, spec, rows)
    return drawn(spec, rows, generator)


def drawn(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    """Return normal floats, or integers from the whole range of ``spec``."""
    shape = (rows, *spec.shape)
    if spec.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    return torch.randint(0, spec.below or 2, shape, generator=generator).to(spec.dtype)


def _labels(case: Case, generator: torch.Generator, rows: int) -> Tensor:
    if case.answers is not None:
        return case.answers(generator, rows)
    if case.labels is not None and case.labels.dtype.is_floating_point:
        return drawn(case.labels, rows, generator)
    shape = (rows, *(case.labels.shape if case.labels else ()))
    below = (case.labels.below if case.labels else None) or max(case.classes, 2)
    y = torch.randint(0, below, shape, generator=generator)
    # Every class where there is room, and one of them in half of the rows that are left.
    flat, favourite = y.view(-1), int(torch.randint(0, below, (), generator=generator))
    flat[:below] = torch.randperm(below, generator=generator)[: flat.numel()]
    flat[below : below + (max(0, flat.numel() - below) + 1) // 2] = favourite
    return y
