"""Training of the user's module as torch does it: in place, by autograd, with everything restored afterwards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.comparison.inputs import batches
from edgefl.comparison.random_draws import GeneratorStates, RandomDrawMode, RandomStream
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import EdgeflError
from edgefl.models.inputs import first_input
from edgefl.models.losses.as_torch import loss_as_torch
from edgefl.models.losses.loss import Loss
from edgefl.models.modes import enter_training, keeping_modes
from edgefl.models.partition.output import select_output
from edgefl.models.python_state.snapshots import restored_state, restoring, snapshot_of
from edgefl.models.source import ModelSource
from edgefl.models.spec import ModelSpec
from edgefl.models.torch_functions.autograd_functions import differentiable
from edgefl.models.torch_functions.control_flow import disable_masking
from edgefl.models.torch_functions.python_random import patched_generators
from edgefl.models.torch_functions.storage import shape_error
from edgefl_export.verify.rounding import double_precision

MAX_RATE, RELATIVE_STEP = 0.1, 0.02
STORED = 5e-7
"""Rounding of a stored weight in three steps, relative to the largest of its tensor."""
_WARM_UP, _TIMED = 2, 5
_PERIOD = 64
"""Steps within which a seed of a generator may come again."""


@dataclass
class TrainingResult:
    """Results of some steps of training, by names in the user's module.

    Attributes:
        losses: loss of each step.
        gradients: sum of the gradients of all steps; parameters without a gradient are absent.
        sizes: largest absolute entry of each sum.
        state: buffers after the steps, and parameters that the sums do not explain, such as frozen ones.
        streams: random numbers of each step.
        rate: learning rate.
        output: output in inference after the steps for the last batch. None if the module fails, draws random numbers, or
            returns its loss.
    """

    losses: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    streams: list[RandomStream] = field(default_factory=list)
    rate: float = 0.0
    output: Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """True if all losses, gradients and floating-point state are finite."""
        return all(map(np.isfinite, (*self.losses, *self.sizes.values()))) and all(
            bool(each.isfinite().all()) for each in self.state.values() if each.is_floating_point()
        )


def train(
    source: ModelSource,
    loss: Loss,
    batches: Sequence[Tensors],
    seed: int,
    *,
    rate: float | None = None,
    around: Callable[[], Any] = nullcontext,
    double: bool = False,
) -> TrainingResult:
    """Train the user's module by one step of SGD on each batch, return the results, and restore the module.

    Args:
        source: the module.
        loss: loss to minimise, unless the module returns its loss itself.
        batches: inputs and labels of each step by name.
        seed: seed of the numbers that the module draws.
        rate: learning rate; by default one that changes the weights by two per cent in the first step.
        around: function that returns a context for the forward pass, the loss and the backward pass of a step.
        double: True to compute in float64.

    Raises:
        ModelError: if a random number of Python or numpy influences a result, or a buffer changes its shape.
        Exception: any error that the module raises.
    """
    module, trained = source.module, TrainingResult()
    with restored(module) as before, warnings.catch_warnings(), ExitStack() as stack:
        stack.enter_context(restoring(snapshot_of(module, loss)))
        warnings.simplefilter("ignore")
        enter_training(module)
        stack.enter_context(_in_float64(module) if double else nullcontext())
        parameters = dict(module.named_parameters())
        shapes = {name: each.detach() for name, each in module.named_buffers()}
        generators = GeneratorStates()
        samples = [widen(batch) for batch in batches] if double else batches
        for number, batch in enumerate(samples):
            stream = RandomStream(seed + number)
            with around():
                with (
                    double_precision() if double else nullcontext(),
                    differentiable(),
                    RandomDrawMode(stream, generators),
                    torch.enable_grad(),
                ):
                    value = loss_of_batch(source, loss, batch)
                for name, each in module.named_buffers():
                    if name in shapes and each.shape != shapes[name].shape:
                        raise shape_error(f"buffer {name!r}", shapes[name], each)
                value.backward()
            trained.losses.append(float(value.detach()))
            trained.streams.append(stream)
            if not trained.rate:
                trained.rate = _rate(parameters) if rate is None else rate
            _step(parameters, trained)
        trained.sizes = {name: largest(each) for name, each in trained.gradients.items()}
        trained.state = {
            name: each.detach().clone()
            for name, each in (*module.named_parameters(), *module.named_buffers())
            if not _is_moved_by_sgd(each, before.get(id(each)), trained.gradients.get(name), trained.rate)
        }
        with double_precision() if double else nullcontext(), suppress(Exception):
            trained.output = _infer(source, samples[-1], RandomStream(seed))
        if generators.is_seeded and not double:
            _draw_on(source, loss, samples[-1], generators)
    return trained


def _draw_on(source: ModelSource, loss: Loss, batch: Tensors, generators: GeneratorStates) -> None:
    """Run more forward passes of a module that seeds generators, to detect repeated random numbers.

    Raises:
        ModelError: if it draws the same numbers again.
    """
    enter_training(source.module)
    try:
        for _ in range(_PERIOD):
            with RandomDrawMode(RandomStream(0), generators):
                loss_of_batch(source, loss, batch)
    except EdgeflError:
        raise
    except Exception:  # such as of Python state that runs out, about which the steps say more
        return


@torch.no_grad()
def _infer(source: ModelSource, batch: Mapping[str, Tensor], stream: RandomStream) -> Tensor | None:
    """Return the output of the module in inference; None if it returns its loss or draws random numbers."""
    if source.returned_loss is not None:
        return None
    source.module.eval()
    with RandomDrawMode(stream):
        output = _output(source, batch, {})
    return None if stream.drawn else output


def torch_step_ms(spec: ModelSpec, batch: int, seed: int) -> float:
    """Return the median time of a training step of the user's module by torch on one thread, in milliseconds.

    Return 0 if the model was not cut from a module.

    Args:
        spec: the model that was cut from the module.
        batch: number of random samples of a step.
        seed: seed of the samples.
    """
    source = spec.source
    if source is None:
        return 0.0
    (samples,) = batches(spec, batch, 1, seed, attempt=1)
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        with restoring(snapshot_of(source.module, spec.loss)), restored(source.module):
            enter_training(source.module)
            optimizer = torch.optim.SGD([p for p in source.module.parameters() if p.requires_grad], lr=1e-6)
            for _ in range(_WARM_UP + _TIMED):
                start = time.perf_counter()
                optimizer.zero_grad(set_to_none=True)
                loss_of_batch(source, spec.loss, samples).backward()
                optimizer.step()
                times.append(1e3 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return median(times[_WARM_UP:])


def loss_of_batch(source: ModelSource, loss: Loss, batch: Mapping[str, Tensor]) -> Tensor:
    """Call the module once on ``batch`` and return the loss that torch minimises: ``loss`` of its output, or the loss
    that it returns.
    """
    if source.returned_loss is None:
        return loss_as_torch(loss)(_output(source, batch, {}), batch["y"])
    return _output(source, batch, {source.returned_loss.labels: batch["y"]})


def _output(source: ModelSource, batch: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Tensor:
    """Call the module on ``batch``. Return its output, or the loss that it returns if ``labels`` (its keyword arguments)
    are not empty.
    """
    module, sample = source.module, source.request.sample
    if isinstance(sample, Mapping):
        first, *others = first_input(type(module), sample)
        named = {first: batch["x"], **{name: batch[name] for name in others}}
        returned = module(**named, **labels)
    else:
        returned = module(batch["x"], **labels)
    key = source.request.output if source.returned_loss is None else source.returned_loss.key
    return select_output(returned, key, type(module).__name__)


def _rate(parameters: Mapping[str, nn.Parameter]) -> float:
    """Return a learning rate that changes the weights by ``RELATIVE_STEP`` of their size, at most ``MAX_RATE``."""
    size = slope = 0.0
    for parameter in parameters.values():
        if parameter.grad is not None:
            size += float(parameter.detach().abs().square().sum()) + 1e-4 * parameter.numel()
            slope += float(parameter.grad.abs().square().sum())
    return min(MAX_RATE, RELATIVE_STEP * (size / slope) ** 0.5) if slope > 0 else MAX_RATE


@torch.no_grad()
def _step(parameters: Mapping[str, nn.Parameter], trained: TrainingResult) -> None:
    for name, parameter in parameters.items():
        slope, parameter.grad = parameter.grad, None
        if slope is None:
            continue
        gradient = slope.to_dense() if slope.is_sparse else slope
        parameter.sub_(gradient, alpha=trained.rate)
        if name in trained.gradients:
            trained.gradients[name] += gradient
        else:
            trained.gradients[name] = gradient


@torch.no_grad()
def _is_moved_by_sgd(now: Tensor, before: Tensor | None, gradient: Tensor | None, rate: float) -> bool:
    """Return True if ``now`` is ``before - rate * gradient`` up to rounding, so that no other code wrote the tensor."""
    if before is None or gradient is None or before.shape != now.shape:
        return False
    rest = before.sub(gradient, alpha=rate).sub_(now)
    return not rest.numel() or bool(rest.abs().max() <= STORED * before.abs().max())


@contextmanager
def restored(module: nn.Module) -> Iterator[Mapping[int, Tensor]]:
    """Open a context whose end restores the whole state of ``module``: attributes, modes, tensors, gradients, and
    torch's generators.

    Inside, the generators of Python and numpy are patched and do not advance in this thread.

    Yields:
        The values of parameters and buffers before the ``with`` block, by ``id`` of the tensor.
    """
    tensors = _tensors(module)
    values = {key: each.detach().clone() for key, each in tensors.items()}
    data = {key: each.data for key, each in tensors.items() if each.is_leaf}
    gradients = {key: each.grad for key, each in tensors.items() if each.is_leaf}
    learns = {key: each.requires_grad for key, each in tensors.items() if each.is_leaf}
    groups = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    for each in tensors.values():
        if each.is_leaf:
            each.grad = None
    with ExitStack() as stack:
        stack.enter_context(keeping_modes(module))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(patched_generators(module))
        stack.enter_context(restored_state(module))
        stack.enter_context(_apply_deviations(module))
        try:
            yield values
        finally:
            for part, parameters, buffers in groups:
                _refill(part._parameters, parameters)
                _refill(part._buffers, buffers)
            for key, each in tensors.items():
                if key in data:
                    each.data = data[key]  # the memory that it had
                    _write(each.data, values[key])
                    if each.requires_grad != learns[key]:
                        each.requires_grad_(learns[key])
                    each.grad = gradients[key]


@torch.inference_mode()  # which may write to tensors that were made in it
def _write(tensor: Tensor, values: Tensor) -> None:
    """Write ``values`` into ``tensor``, which may be expanded, so that several entries share memory."""
    if tensor.layout is torch.strided:
        distinct = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
        tensor, values = tensor[distinct], values[distinct]
    tensor.copy_(values)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 for a tensor without entries."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def widen(batch: Tensors) -> Tensors:
    """Return ``batch`` with its float32 tensors converted to float64. Other tensors stay as they are."""
    return {name: each.double() if each.dtype == torch.float32 else each for name, each in batch.items()}


@contextmanager
def _in_float64(module: nn.Module) -> Iterator[None]:
    """Open a context in which the float32 parameters and buffers of ``module`` are float64. They stay the same objects,
    as hooks need.
    """
    tensors = _tensors(module)
    narrow = [(each, each.data) for each in tensors.values() if each.is_leaf and each.dtype == torch.float32]
    for each, values in narrow:
        each.data = values.double()
    try:
        yield
    finally:
        for each, values in narrow:
            each.grad = None
            each.data = values


def _tensors(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters and buffers of all submodules by ``id``."""
    parts = ((*part._parameters.values(), *part._buffers.values()) for part in module.modules())
    return {id(each): each for held in parts for each in held if each is not None}


def _refill(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    now.clear()
    now.update(before)


@contextmanager
def _apply_deviations(module: nn.Module) -> Iterator[None]:
    """Open a context in which torch runs ``module`` with the same deviations as devices, such as without SpecAugment.

    Users were warned of these deviations when the model was cut.
    """
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = part.__dict__.get("config")
        if hasattr(config, "apply_spec_augment"):
            configs[id(config)] = config
    before = [(config, config.apply_spec_augment) for config in configs.values()]
    disable_masking(module)
    try:
        yield
    finally:
        for config, value in before:
            config.apply_spec_augment = value


def inputs_of(source: ModelSource) -> Mapping[str, TensorSpec]:
    """Return the spec of one sample of each input by name; the first input is called ``x``."""
    sample = source.request.sample
    return sample if isinstance(sample, Mapping) else {"x": sample}
