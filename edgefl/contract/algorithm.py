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
"""Standard deviation of a random parameter around the model's value, relative to that value."""
_USUAL = 0.1
"""Magnitude of drawn weights, and of parameters that are zero or nearly so."""
_SMALL = 1e-2
"""Magnitude below which a parameter is scaled up: errors behind a factor of 1e-6 would be too small to detect."""
_MAGNITUDES = (1.0, 100.0, 10.0, 0.1)
_WHOLE = (9, 1000, 10**6, 2**25, 2**40)
"""Magnitudes of whole numbers. From 2^24 on float32 cannot represent all of them."""


def draw(name: str, spec: TensorSpec, generator: torch.Generator, label_range: int) -> Tensor:
    """Return a random tensor that is a valid input for one port, that is, for one named input of a function.

    Weights of the model are noisy copies of their values. Integers are uniform in their range. Other floats are
    normal.

    Args:
        name: Name of the port. Its first part, the role, decides the distribution (:meth:`Function.example`).
        spec: Shape and dtype of the result, its range, and for weights the model's values.
        generator: Source of random numbers.
        label_range: Exclusive upper bound of integers, used if ``spec.below`` is None.
    """
    if spec.values is not None and name.startswith(_WEIGHTS) and "/" not in name:
        return _draw_near(name, spec.values, generator)
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


def _draw_near(name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """Return a noisy copy of the model's ``values``, on the CPU.

    Code may take a root or a logarithm of the model's values, or divide by them. So the copy stays close to them.
    Buffers, integers, empty tensors and values that are not finite are copied unchanged. The exceptions are a batch
    norm's running mean and variance, which get noise too.
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
    """Return True if the values of input ``spec`` have no known range: no ``below``, neither bool nor uint8, and not a
    scalar.
    """
    return spec.below is None and spec.dtype not in (torch.bool, torch.uint8) and bool(spec.shape)


def draw_wide(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Return random samples of ``spec`` with several magnitudes. The first dimension of ``spec.shape`` counts samples.

    Sample i of a float tensor has the standard deviation ``_MAGNITUDES[i % 4]``. Each entry of an integer tensor has
    a random bound from ``_WHOLE`` and a random sign.
    """
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
    """One pure function of an algorithm, with the specs of its inputs.

    Attributes:
        name: Name of the function, and of the graph that is exported from it.
        fn: Function from tensors by port name to tensors by port name. Inputs have the shapes and dtypes of
            ``inputs``. Outputs need no declaration.
        inputs: Spec of each input port, by name. A port is a named input; its role (first part of the name)
            defines who feeds it.
        label_range: Exclusive upper bound of integer inputs in random examples, if their spec has no ``below``.
        fixed: True if training never changes the tensors that ``fn`` closes over, such as a filter bank. The
            exported graph may then contain them as constants of any size.
        activations: Storage of values that are saved for the backward pass
            (:mod:`edgefl.algorithms.activations`).
        metrics: Names of the metrics computed from an evaluation's sums (:mod:`edgefl.wire.metrics`), the main
            one first.
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
        """Return random inputs that satisfy the ports, by port name.

        Floats are normal. Integers lie in their range; if the loss ignores a label, a share of the labels has that
        value. Noise lies in [0, 1). Weights come from the model: buffers as they are, parameters near their values
        (:func:`draw`). Weights without known values are drawn: running variances from [0.5, 1.5), and weights of one
        dimension around 1, because they scale what a norm returns.

        Args:
            seed: Seed of the random numbers. The same seed gives the same tensors.
        """
        generator = torch.Generator().manual_seed(seed)
        return {name: draw(name, spec, generator, self.label_range) for name, spec in self.inputs.items()}

    def wide_example(self, seed: int) -> Tensors | None:
        """Return :meth:`example` with samples of several magnitudes, or None if the range of every ``batch.*`` input is
        known.

        Rows of floats have standard deviations of 0.1, 1, 10 and 100. Integers of unknown range include negative and
        large ones. The function may raise an error for such inputs, for instance because an integer is an index into a
        table.
        """
        generator = torch.Generator().manual_seed(seed)
        wide = {
            name: draw_wide(spec, generator)
            for name, spec in self.inputs.items()
            if name.startswith("batch.") and is_open(spec)
        }
        return self.example(seed) | wide if wide else None


@dataclass(frozen=True)
class Phase:
    """Repetitions of one training step. The phases of an algorithm run in order.

    Attributes:
        name: Name of the phase, unique in the algorithm.
        function: The step.
        steps: Number of repetitions.
        over_data: True: one pass over all local samples in their order, instead of ``steps``. The last batch is filled
            up with the first samples, and ``batch.<k>.mask`` float32 (batch,) is 0 at these rows, 1 elsewhere.
        shorter: The same step compiled for shorter batches: from the largest number of tokens of a sample to the
            function, by ascending length.
    """

    name: str
    function: Function
    steps: int
    over_data: bool = False
    shorter: Mapping[int, Function] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[Function, ...]:
        """Functions of the step: the one for full length first, then those for shorter batches."""
        return (self.function, *self.shorter.values())


@dataclass(frozen=True)
class CarryRule:
    """Validity of the carry: the state that an algorithm stores on a device from one exchange to the next.

    An exchange is one round trip between server and device.

    Attributes:
        exchanges: Number of completed exchanges after which a device drops the carry and reports that. 0: it
            stays valid as long as the run lasts.
        needed: True: a device without a carry declines the task. False: it starts with zeros.
        any_tier: True: a device that changed its tier continues from the carry of the other tier, if shapes and dtypes
            fit.
    """

    exchanges: int = 0
    needed: bool = False
    any_tier: bool = False


@dataclass(frozen=True)
class Algorithm:
    """Local training of a client: ``start``, the ``phases`` in order, ``finish``. ``evaluate`` measures held-out data.

    ``start`` and ``finish`` read ``weights.*``, the received weights, and ``carry.*``, the state that the device
    stored in its last exchange. An exchange is one round trip between server and device. An update that holds changes
    is computed from ``weights.*`` in ``finish``, so training stores no second copy of the initial weights.

    A method may need several exchanges, each described by an Algorithm. It runs those of ``opening`` once, in order.
    Then it repeats those of ``ahead`` and this one in turn. All have the same ``name``, so each reads the carry that
    the exchange before it has stored.

    Attributes:
        name: Name of the algorithm, equal in all its exchanges.
        start: Function that turns the received weights and the carry into the state of the first step.
        phases: Training steps with their numbers of repetitions.
        finish: Function that turns the state after the last step into the update and the new carry.
        evaluate: Function that computes metrics on held-out data.
        hyper: Default of every ``hyper.*`` scalar.
        schedule: Function that returns the scalars which the server announces for an exchange instead of these
            defaults.
        announced: Names of options that change only ``schedule`` and whose scalars have other names (``eta.3`` of
            ``lr``).
        form: Encoding of ``update.*``.
        masks: Number of bits of each ``update.*`` that consists of packed bits.
        inference: Function from ``weights.*`` to the ``weights.*`` that ``evaluate`` uses. None: they are the
            same. Units that such an algorithm does not train would not fit those that it trains.
        personalize: Function from ``weights.*`` and one batch to ``weights.*``: one step that adapts the model to
            a device's own data. None: the algorithm has none.
        draws: "walk": batches follow a shuffled pass over the data. "draw": each batch is drawn independently,
            without replacement. "length" (with ``shorter`` steps): a batch has samples of similar length.
        server: Server optimizer that is applied to the averages.
        opening: Exchanges that run once, before all others.
        ahead: Exchanges that run before this one in every cycle.
        carry_rule: Validity of the carry.
        whole: True if every device must take part in every exchange.
        private: Names of parameters and buffers that stay on the device, in ``carry.private.*``. ``update.*`` does not
            hold them, and the server's model keeps their initial values.
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
    private: frozenset[str] = frozenset()

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions that are exported for devices: ``start``, the steps, ``finish``, ``evaluate``, and
        ``personalize`` if there is one.
        """
        last = () if self.personalize is None else (self.personalize,)
        steps = (function for phase in self.phases for function in phase.functions)
        return (self.start, *steps, self.finish, self.evaluate, *last)

    @property
    def exchanges(self) -> tuple[Algorithm, ...]:
        """All exchanges (round trips between server and device) of the method, each once: ``opening``, then ``ahead``,
        then this algorithm.
        """
        return (*self.opening, *self.ahead, self)

    @property
    def server_state(self) -> Mapping[str, float]:
        """Initial value of each kind of tensor that the server keeps beside the model, such as a momentum ``m``.

        The keys are the names of these states; all exchanges (round trips between server and device) of the method are
        included.
        """
        return dict(chain.from_iterable(each.server.state.items() for each in self.exchanges))
