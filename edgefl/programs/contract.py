"""The program contract: a client's local algorithm as pure functions of named tensors.

A function maps a flat ``dict[str, Tensor]`` to a flat ``dict[str, Tensor]``. The first part of a dotted
name is the *role* (who feeds or receives the tensor), the rest is the tensor's own name::

    weights.block1.conv1.weight      blobs of the round's model version
    state.momentum.block1.conv1.weight   the runtime, from the previous call
    carry.residual.head.weight       the device's store, from its previous round (``start`` and ``finish`` read it)
    batch.0.x, batch.0.y             the data loader; a program may ask for several independent batches
    data.class_counts                facts about the device's own samples, which stay on it
    noise.dither                     uniform [0, 1) drawn by the runtime from a seeded generator
    hyper.lr                         scalars of the task

and, for outputs only, ``update.*`` (sent to the server), ``metric.*`` (scalars for people) and ``record.x``
(the boundary activations a forward chunk leaves behind).

The same function runs as it is in torch, is traced and exported, and runs on the device from the artifact.
Randomness is an input, shapes are static, and nothing outside the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from edgefl.codecs.form import DENSE, Form

Tensors = dict[str, Tensor]
_Value = TypeVar("_Value")
INPUT_ROLES = frozenset({"weights", "state", "carry", "batch", "data", "noise", "hyper"})
OUTPUT_ROLES = frozenset({"state", "carry", "update", "metric", "record"})


@dataclass(frozen=True)
class TensorSpec:
    """Static shape and dtype of a port; shape excludes nothing (batch dimensions are written out)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    # Valid values are the whole numbers 0 .. below-1: token numbers, class labels. None says nothing about them.
    below: int | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def rows(self, count: int) -> TensorSpec:
        """``count`` of these with a batch dimension in front, for a spec of one sample."""
        return TensorSpec((count, *self.shape), self.dtype, self.below)


@dataclass(frozen=True)
class Function:
    """One pure function of a program, with the ports it reads.

    Outputs need no declaration: they are what ``fn`` returns, in that order.
    ``label_range`` bounds integer inputs that do not say it themselves, so that random examples are valid.
    """

    name: str
    fn: Callable[[Tensors], Tensors]
    inputs: Mapping[str, TensorSpec]
    label_range: int = 2

    def __call__(self, tensors: Tensors) -> Tensors:
        return self.fn(tensors)

    def example(self, seed: int) -> Tensors:
        """Random inputs that satisfy the ports: normal floats, whole numbers in their range, noise in [0, 1).

        Running variances must be positive, so names that end in ``running_var`` are drawn from [0.5, 1.5).
        """
        generator = torch.Generator().manual_seed(seed)
        return {name: _example(name, spec, generator, self.label_range) for name, spec in self.inputs.items()}


def _example(name: str, spec: TensorSpec, generator: torch.Generator, label_range: int) -> Tensor:
    if spec.below is not None or not spec.dtype.is_floating_point:
        below = label_range if spec.below is None else spec.below
        return torch.randint(0, below, spec.shape, generator=generator, dtype=spec.dtype)
    uniform = name.startswith("noise.") or name.endswith("running_var")
    if uniform:
        shift = 0.5 if name.endswith("running_var") else 0.0
        return torch.rand(spec.shape, generator=generator, dtype=spec.dtype) + shift
    if name.startswith("hyper."):
        return torch.full(spec.shape, 0.1, dtype=spec.dtype)
    scale = 1.0 if name.startswith("batch.") else 0.1
    return torch.randn(spec.shape, generator=generator, dtype=spec.dtype) * scale


@dataclass(frozen=True)
class Phase:
    """``steps`` repetitions of one step function; phases run in order."""

    name: str
    function: Function
    steps: int


@dataclass(frozen=True)
class Program:
    """A client's round: ``start``, the phases in order, ``finish``; ``evaluate`` reports a loss on held-out data.

    ``start`` and ``finish`` read ``weights.*`` and ``carry.*``: a change is what training left of the weights minus the
    weights it began with, which need no second copy while it goes on. ``hyper`` holds the default of every ``hyper.*``
    scalar; the round announcement may override each. ``late`` names those that the server announces as 0 until this
    fraction of the rounds has passed. ``form`` says what the bytes of ``update.*`` mean; ``masks`` names those that are
    packed bits, with their number of bits. ``own_inference``: ``evaluate`` reads the weights in another form than they
    travel in, so that units which this program does not train would not fit those that it does.
    """

    name: str
    start: Function
    phases: tuple[Phase, ...]
    finish: Function
    evaluate: Function
    hyper: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    form: Form = DENSE
    masks: Mapping[str, int] = field(default_factory=dict)
    own_inference: bool = False

    @property
    def functions(self) -> tuple[Function, ...]:
        return (self.start, *(phase.function for phase in self.phases), self.finish, self.evaluate)


def role_of(port: str) -> str:
    """Role of a port: the first part of its dotted name."""
    return port.partition(".")[0]


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors below ``prefix``, with the prefix removed: ``select(t, "state.weights")``."""
    start = prefix + "."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


def prefixed(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """The inverse of :func:`select`, for tensors and for their specs."""
    return {f"{prefix}.{name}": value for name, value in named.items()}
