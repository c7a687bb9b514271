"""The algorithm contract: a client's local algorithm as pure functions of named tensors.

A function maps a flat ``dict[str, Tensor]`` to a flat ``dict[str, Tensor]``. The first part of a dotted
name is the *role* (who feeds or receives the tensor), the rest is the tensor's own name::

    weights.block1.conv1.weight      blobs of the round's model version
    state.momentum.block1.conv1.weight   the runtime, from the previous call
    carry.residual.head.weight       the device's store, from its previous round (``start`` and ``finish`` read it)
    batch.0.x, batch.0.y             the data loader; an algorithm may ask for several independent batches
    data.class_counts                facts about the device's own samples, which stay on it
    noise.dither                     uniform [0, 1) drawn by the runtime from a seeded generator
    hyper.lr                         scalars of the task

and, for outputs only, ``update.*`` (sent to the server), ``metric.*`` (scalars for people) and ``record.x``
(the boundary activations a forward chunk leaves behind). ``personalize`` returns ``weights.*``.

What the server keeps beside the model (SCAFFOLD's c, FAFED's m and v) are more weights to a device: the tensor of ``m``
for ``conv.weight`` is called ``m/conv.weight``, is read as ``weights.m/conv.weight`` and sent as ``update.m/conv.weight``.

The same function runs as it is in torch, is traced and exported, and runs on the device from the artifact.
Randomness is an input, shapes are static, and nothing outside the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from edgefl.config.choices import Activations
from edgefl.contract.schedule import Schedule, constant
from edgefl.contract.server import MEAN, ServerOpt
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.wire.bundle.manifest import Draws
from edgefl.wire.update.form import DENSE, Form

# Random inputs of functions, on which exported graphs are compared with torch.

_WEIGHTS = ("weights.", "state.weights.")
"""What the names of a model's weights begin with in a function's inputs."""
_IGNORED = 0.2
"""Share of the random labels that are ignored ones, if the loss ignores any."""
_NEAR = 0.1
"""Standard deviation of a parameter around its value, relative to the value."""
_USUAL = 0.1
"""Magnitude of drawn weights, and of parameters that are zero or nearly so."""
_SMALL = 1e-2
"""A parameter of smaller magnitude is scaled up: errors behind a factor of 1e-6 would be too small to be seen."""
_MAGNITUDES = (1.0, 100.0, 10.0, 0.1)
_WHOLE = (9, 1000, 10**6, 2**25, 2**40)
"""Magnitudes of whole numbers. From 2^24 on float32 does not have all of them."""


def usual(name: str, spec: TensorSpec, generator: torch.Generator, label_range: int) -> Tensor:
    """Return the random tensor of one port (:meth:`edgefl.contract.algorithm.Function.example`).

    Args:
        name: The port. Its role decides the distribution.
        spec: Shape, dtype, range and, for weights, the model's values.
        generator: Source of random numbers.
        label_range: Bound of whole numbers whose spec has none.
    """
    if spec.values is not None and name.startswith(_WEIGHTS) and "/" not in name:
        return _near(name, spec.values, generator)
    if spec.below is not None or not spec.dtype.is_floating_point:
        below = label_range if spec.below is None else spec.below
        drawn = torch.randint(0, below, spec.shape, generator=generator, dtype=spec.dtype)
        if spec.ignored is None:
            return drawn
        few = torch.rand(spec.shape, generator=generator) < _IGNORED
        return torch.where(few, torch.full_like(drawn, spec.ignored), drawn)
    uniform = name.startswith("noise.") or name.endswith("running_var")
    if uniform:
        shift = 0.5 if name.endswith("running_var") else 0.0
        return torch.rand(spec.shape, generator=generator, dtype=spec.dtype) + shift
    if name.startswith("hyper."):
        return torch.full(spec.shape, 0.1, dtype=spec.dtype)
    scale = 1.0 if name.startswith("batch.") else _USUAL
    around = 1.0 if len(spec.shape) == 1 and name.startswith(_WEIGHTS) and name.endswith(".weight") else 0.0
    return around + torch.randn(spec.shape, generator=generator, dtype=spec.dtype) * scale


def _near(name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """Return values that the model can have: code may take a root or a logarithm of them, or divide by them.

    A buffer is a constant of the model, except for the statistics of batch norm, which start at 0 and 1.
    """
    is_parameter = isinstance(values, nn.Parameter)
    values = values.detach().cpu().clone(memory_format=torch.contiguous_format)
    if not values.is_floating_point() or not values.numel() or not values.isfinite().all():
        return values
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    if name.endswith("running_mean"):
        return values + _USUAL * noise
    if name.endswith("running_var"):
        return values * (1.0 + _NEAR * noise).abs()
    if not is_parameter:
        return values
    magnitude = values.square().mean().sqrt()
    if not magnitude:
        return _USUAL * noise
    if magnitude < _SMALL:
        values, magnitude = values * (_USUAL / magnitude), torch.full((), _USUAL, dtype=values.dtype)
    return values + _NEAR * noise * torch.where(values == 0, magnitude, values.abs())


def is_open(spec: TensorSpec) -> bool:
    """Return True if nothing is known of the values of samples."""
    return spec.below is None and spec.dtype not in (torch.bool, torch.uint8) and bool(spec.shape)


def widened(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Return samples of several magnitudes: floats row by row, whole numbers entry by entry."""
    if spec.dtype.is_floating_point:
        drawn = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        rows = torch.tensor(_MAGNITUDES, dtype=spec.dtype)[torch.arange(spec.shape[0]) % len(_MAGNITUDES)]
        return drawn * rows.reshape(-1, *[1] * (len(spec.shape) - 1))
    largest = torch.tensor([min(each, torch.iinfo(spec.dtype).max) for each in _WHOLE])
    most = largest[torch.randint(0, len(_WHOLE), spec.shape, generator=generator)]
    return ((2 * torch.rand(spec.shape, generator=generator, dtype=torch.float64) - 1) * most).to(spec.dtype)


INPUT_ROLES = frozenset({"weights", "state", "carry", "batch", "data", "noise", "hyper"})
OUTPUT_ROLES = frozenset({"state", "carry", "update", "metric", "record", "weights"})


@dataclass(frozen=True)
class Function:
    """One pure function of an algorithm: its ``name``, the function ``fn`` and its ``inputs``, specs by port.

    ``fn`` maps tensors by port, of the shapes and dtypes that ``inputs`` say, to tensors by port; outputs need no
    declaration. ``label_range`` bounds integer inputs that do not say it themselves, so that random examples are valid.
    ``fixed``: what it closes over are numbers that no training changes, such as a filter bank, so that they may be
    constants of any size. ``activations``: how what its forward pass makes waits for the backward pass
    (:mod:`edgefl.algorithms.activations`). ``metrics``: of an evaluation, what its sums make
    (:mod:`edgefl.wire.metrics`), the one that people are shown first.
    """

    name: str
    fn: Callable[[Tensors], Tensors]
    inputs: Mapping[str, TensorSpec]
    label_range: int = 2
    fixed: bool = False
    activations: Activations = "float32"
    metrics: tuple[str, ...] = ()

    def __call__(self, tensors: Tensors) -> Tensors:
        return self.fn(tensors)

    def example(self, seed: int) -> Tensors:
        """Return random inputs that satisfy the ports.

        Floats are normal, whole numbers lie in their range (a few labels are ignored ones, if the loss ignores any), noise
        lies in [0, 1). Weights come from the model: buffers as they are, parameters near their values
        (:func:`usual`). Weights without known values are drawn: running variances from [0.5, 1.5), and
        weights of one dimension around 1, because they scale what a norm returns.
        """
        generator = torch.Generator().manual_seed(seed)
        return {name: usual(name, spec, generator, self.label_range) for name, spec in self.inputs.items()}

    def wide_example(self, seed: int) -> Tensors | None:
        """Return :meth:`example` with samples of several magnitudes: rows of floats around 0.1, 1, 10 and 100, and whole
        numbers of unknown range that include negative and large ones.

        Return None if no sample can be so wide. The function may refuse a wide example, for instance because a whole
        number is a position in a table.
        """
        generator = torch.Generator().manual_seed(seed)
        wide = {
            name: widened(spec, generator)
            for name, spec in self.inputs.items()
            if name.startswith("batch.") and is_open(spec)
        }
        return self.example(seed) | wide if wide else None


@dataclass(frozen=True)
class Phase:
    """``steps`` repetitions of one step ``function``, called ``name``; phases run in order.

    ``over_data``: one pass over all local samples in place of ``steps``, in their order. The last batch is filled up by
    wrap-around, and ``batch.<k>.mask`` float32 (batch,) is 0 at the rows that were filled in, 1 elsewhere.

    ``shorter``: the same step for samples of which no more than so many tokens count, by ascending length.
    """

    name: str
    function: Function
    steps: int
    over_data: bool = False
    shorter: Mapping[int, Function] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The whole step first."""
        return (self.function, *self.shorter.values())


@dataclass(frozen=True)
class CarryRule:
    """What a device's ``carry`` means to later exchanges.

    ``exchanges``: for how many it is good, counted in completed ones; 0 is for as long as the run goes. A device whose
    carry is older drops it and says so. ``needed``: without it the device does not take part and says so, instead of
    beginning with zeros.
    """

    exchanges: int = 0
    needed: bool = False


@dataclass(frozen=True)
class Algorithm:
    """A client's round: ``start``, the ``phases`` in order, ``finish``; ``evaluate`` reports a loss on held-out data.

    ``start`` and ``finish`` read ``weights.*`` and ``carry.*``: a change is what training left of the weights minus the
    weights it began with, which need no second copy while it goes on. ``hyper`` holds the default of every ``hyper.*``
    scalar of the algorithm called ``name``; ``schedule`` those that the server announces otherwise, exchange by exchange;
    ``announced`` names the options that act through it alone, where it has other names than they (``eta.3`` of ``lr``).
    ``form`` says what the bytes of ``update.*`` mean; ``masks`` names those that are packed bits, with their number of
    bits. ``inference`` maps ``weights.*`` to the ``weights.*`` that ``evaluate`` computes with, if these have another
    form than those that travel. Units that such an algorithm does not train would not fit those that it does.

    ``personalize`` maps ``weights.*`` and one batch to ``weights.*``: one step that adapts the model to a device's own
    data. ``draws``: batches are walked through in shuffled order ("walk"), or each is drawn anew, without replacement
    inside and independent of all others ("draw"); with ``shorter`` steps those of like length come together ("length").

    ``server`` is what the server makes of the averages. A method of several exchanges has those of ``opening`` once, in
    order, and then those of ``ahead`` and this one in turn; all have the same ``name``, so a carry passes from one to the
    next; ``carry_rule`` says how long it is good for. ``whole``: every device has to take part in every exchange.
    """

    name: str
    start: Function
    phases: tuple[Phase, ...]
    finish: Function
    evaluate: Function
    hyper: Mapping[str, float] = field(default_factory=dict)
    schedule: Schedule = constant
    announced: frozenset[str] = frozenset()
    form: Form = DENSE
    masks: Mapping[str, int] = field(default_factory=dict)
    inference: Function | None = None
    personalize: Function | None = None
    draws: Draws = "walk"
    server: ServerOpt = MEAN
    opening: tuple[Algorithm, ...] = ()
    ahead: tuple[Algorithm, ...] = ()
    carry_rule: CarryRule = CarryRule()
    whole: bool = False

    @property
    def functions(self) -> tuple[Function, ...]:
        """What a bundle holds."""
        last = () if self.personalize is None else (self.personalize,)
        steps = (function for phase in self.phases for function in phase.functions)
        return (self.start, *steps, self.finish, self.evaluate, *last)

    @property
    def exchanges(self) -> tuple[Algorithm, ...]:
        """Every exchange of the method, in the order in which they first come."""
        return (*self.opening, *self.ahead, self)

    def exchange(self, position: int) -> Algorithm:
        """The exchange that comes after ``position`` completed ones."""
        if position < len(self.opening):
            return self.opening[position]
        turns = (*self.ahead, self)
        return turns[(position - len(self.opening)) % len(turns)]

    @property
    def server_state(self) -> Mapping[str, float]:
        """The server's states over all exchanges, by name, with the values that their entries begin with."""
        return dict(chain.from_iterable(each.server.state.items() for each in self.exchanges))
