"""The algorithm contract: a client's local algorithm as pure functions of named tensors.

A function maps a flat ``dict[str, Tensor]`` to a flat ``dict[str, Tensor]``. The first part of a dotted
name is the *role* (who feeds or receives the tensor), the rest is the tensor's own name::

    weights.block1.conv1.weight      blobs of the round's model version
    state.momentum.block1.conv1.weight   the runtime, from the previous call
    carry.residual.head.weight       the device's store, from its previous round (``start`` and ``finish`` read it)
    batch.0.x, batch.0.y             the data loader; an algorithm may ask for several independent batches;
    data.class_counts                facts about the device's own samples, which stay on it;
    noise.dither                     uniform [0, 1) drawn by the runtime from a seeded generator;
    hyper.lr                         scalars of the task;

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

from edgefl.config.tables import Activations
from edgefl.contract.server import MEAN, Schedule, ServerOpt, constant
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.wire.bundle.manifest import Draws
from edgefl.wire.update.form import DENSE, Form

# Random inputs of functions, on which exported graphs are compared with torch.

_WEIGHTS = ("weights.", "state.weights.")
"""Prefixes of a model's weights in a function's inputs."""
_IGNORED = 0.2
"""Share of ignored labels among random ones, if the loss ignores any."""
_NEAR = 0.1
"""Standard deviation of a parameter around its value, relative to the value."""
_USUAL = 0.1
"""Magnitude of drawn weights, and of parameters that are zero or nearly so."""
_SMALL = 1e-2
"""Magnitude below which a parameter is scaled up: errors behind a factor of 1e-6 would be too small to detect."""
_MAGNITUDES = (1.0, 100.0, 10.0, 0.1)
_WHOLE = (9, 1000, 10**6, 2**25, 2**40)
"""Magnitudes of whole numbers. From 2^24 on float32 cannot represent all of them."""


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
    """Return True if the range of the samples' values is unknown."""
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
    """One pure function of an algorithm.

    Attributes:
        name: Name of its graph.
        fn: Maps tensors by port, with the shapes and dtypes of ``inputs``, to tensors by port. Outputs need no declaration.
        inputs: Spec of each input port.
        label_range: Bound of integer inputs whose spec has none, so that random examples are valid.
        fixed: Its closed-over tensors never change in training, such as a filter bank, so they may be constants of any size.
        activations: Storage of values that wait for the backward pass (:mod:`edgefl.algorithms.activations`).
        metrics: Metrics computed from an evaluation's sums (:mod:`edgefl.wire.metrics`), the headline first.
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
    """``steps`` repetitions of one step ``function``. Phases run in order.

    Attributes:
        name: Name of the phase, unique in the algorithm.
        over_data: One pass over all local samples in their order instead of ``steps``. The last batch is filled up by
            wrap-around, and ``batch.<k>.mask`` float32 (batch,) is 0 at the filled rows, 1 elsewhere.
        shorter: The same step for batches whose samples have at most so many tokens, by ascending length.
    """

    name: str
    function: Function
    steps: int
    over_data: bool = False
    shorter: Mapping[int, Function] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions of the step, the one for full length first."""
        return (self.function, *self.shorter.values())


@dataclass(frozen=True)
class CarryRule:
    """Validity of a device's ``carry`` in later exchanges.

    Attributes:
        exchanges: Completed exchanges for which it is valid. 0: as long as the run lasts. A device drops an older carry and
            reports that.
        needed: Without a carry the device declines, instead of starting with zeros.
    """

    exchanges: int = 0
    needed: bool = False


@dataclass(frozen=True)
class Algorithm:
    """Local training of a client: ``start``, the ``phases`` in order, ``finish``. ``evaluate`` measures held-out data.

    ``start`` and ``finish`` read ``weights.*`` and ``carry.*``. A change is the trained weights minus the initial ones,
    which need no second copy during training.

    A method of several exchanges runs those of ``opening`` once, in order, and then those of ``ahead`` and this one in turn.
    All have the same ``name``, so a carry passes from one to the next.

    Attributes:
        hyper: Default of every ``hyper.*`` scalar.
        schedule: Scalars that the server announces instead, exchange by exchange.
        announced: Options that act through ``schedule`` alone under other names (``eta.3`` of ``lr``).
        form: Encoding of ``update.*``.
        masks: Number of bits of each ``update.*`` that is packed bits.
        inference: Maps ``weights.*`` to the ``weights.*`` that ``evaluate`` uses, if these differ from those that travel.
            Units that such an algorithm does not train would not fit those that it trains.
        personalize: Maps ``weights.*`` and one batch to ``weights.*``: one step that adapts the model to a device's own
            data.
        draws: Batches follow a shuffled pass ("walk"), each is drawn anew without replacement and independently ("draw"),
            or, with ``shorter`` steps, have samples of like length ("length").
        server: Server optimizer for the averages.
        carry_rule: Validity of the carry.
        whole: Every device must take part in every exchange.
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
        """Functions that a bundle contains."""
        last = () if self.personalize is None else (self.personalize,)
        steps = (function for phase in self.phases for function in phase.functions)
        return (self.start, *steps, self.finish, self.evaluate, *last)

    @property
    def exchanges(self) -> tuple[Algorithm, ...]:
        """All exchanges of the method, in the order of their first use."""
        return (*self.opening, *self.ahead, self)

    @property
    def server_state(self) -> Mapping[str, float]:
        """Server states of all exchanges, by name, with their initial values."""
        return dict(chain.from_iterable(each.server.state.items() for each in self.exchanges))
