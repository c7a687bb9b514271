"""A model as an ordered list of named units."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.counters import BufferWatch, restore_counters
from edgefl.models.inputs import extra_inputs
from edgefl.models.losses.classification import CROSS_ENTROPY
from edgefl.models.losses.loss import Loss, metrics_of
from edgefl.models.modes import set_mode
from edgefl.models.python_state.snapshots import move_to_meta, restored_state
from edgefl.models.source import ModelSource
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.layouts import on_meta_device
from edgefl.models.torch_functions.patches import ThreadPatch
from edgefl.models.torch_functions.storage import without_new
from edgefl.models.user_code import user_errors
from edgefl.wire.bundle.manifest import SAMPLE


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Model as an ordered list of units, with the information needed to cut and train it.

    A unit is a stage that is never split. It maps one tensor to one tensor, so a cut may lie between any two units. State
    tensors are named ``<unit>.<name>``. Units may share tensors (:mod:`edgefl.models.tied`).

    Attributes:
        name: Name of the model.
        module: ``nn.Sequential`` whose named children are the units.
        sample: Shape and dtype of one sample as the first unit reads it, without the batch dimension.
        classes: Number of classes of a label, such as a language model's vocabulary. 1 if labels are no classes; 2 for
            a model with a single output (a logit) and cross-entropy.
        accounting_batch: Batch factor of the counted activations: 32 for the paper's ResNet20, 1 for its CNN and LSTM
            (embracingfl.md 2.8).
        loss: Loss that training minimises. It also defines shape and dtype of a label.
        global_names: Name in the state of each tensor of the module that was split, because tied weights have one name
            in the state. Empty if the units are the module.
        source: Module that was split, unchanged. None if the units read samples of any length.
    """

    name: str
    module: nn.Sequential
    sample: TensorSpec
    classes: int
    accounting_batch: int = 32
    loss: Loss = CROSS_ENTROPY
    global_names: Mapping[str, str] = field(default_factory=dict)
    source: ModelSource | None = field(default=None, repr=False)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units (stages of the model) in order."""
        return tuple(name for name, _ in self.module.named_children())

    @property
    def others(self) -> Mapping[str, TensorSpec]:
        """Spec of one sample of each additional input, by name; {} if the model has only one input."""
        return {name: sample for name, sample in extra_inputs(self.module).items() if name != SAMPLE}

    @property
    def weights(self) -> dict[str, Tensor]:
        """All tensors of the state, moving statistics included, by global name. Detached, not copied."""
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}

    def part(self, start: int, stop: int) -> nn.Sequential:
        """Return the units (stages of the model) number ``start`` to ``stop - 1`` (from 0) under their names.

        The modules are shared, not copied.
        """
        return sequential((name, self.module.get_submodule(name)) for name in self.units[start:stop])

    @cached_property
    def _boundaries(self) -> dict[int, TensorSpec]:
        """Cached results of :meth:`boundary`: spec of the tensor behind the first n units (stages of the model), by n."""
        return {}

    def boundary(self, cut: int) -> TensorSpec:
        """Return the spec of one sample of the tensor between two units (stages of the model), without batch dimension.

        Args:
            cut: Number of units before it. 0: the input of the model.

        Raises:
            ModelError: The model has fewer units, or a unit cannot read the output of the one before.
        """
        if not 0 <= cut <= len(self.units):
            raise ModelError(
                f"{self.name} has {len(self.units)} units, so a cut lies in 0..{len(self.units)}; found {cut}",
                cut=cut,
                units=self.units,
            )
        if cut not in self._boundaries:
            self._boundaries[cut] = output_spec(self.part(0, cut), self.sample)
        return self._boundaries[cut]

    def shortened(self, length: int) -> ModelSpec:
        """Return the model for samples whose first dimension is ``length``, such as the tokens of a sequence.

        If the model was split from a module, the module is split again; else the units (stages of the model) are shared.

        Raises:
            ModelError: The model's samples do not have more entries than ``length``, or the shape of a weight depends
                on their number.
        """
        whole = self.sample.shape[0] if self.sample.shape else 0
        if not 1 <= length < whole:
            raise ModelError(
                f"{self.name} reads samples of {whole} entries, and cannot read samples of {length}: give a length "
                f"from 1 to {whole - 1}",
                length=length,
            )
        made: ModelSpec = (
            replace(self, sample=cut_to(self.sample, length))
            if self.source is None
            else self.source.shortened(length)
        )
        shapes = [{name: tensor.shape for name, tensor in each.weights.items()} for each in (self, made)]
        if shapes[0] != shapes[1]:
            other = next((name for name in shapes[0] if shapes[0][name] != shapes[1].get(name)), "one more")
            raise ModelError(
                f"{self.name} has weights whose shape depends on the length of a sample, such as {other!r}: it has one "
                "length",
                length=length,
                tensor=other,
            )
        return made

    @property
    def label(self) -> TensorSpec:
        """Spec of one label. Reading it raises ModelError if the loss cannot read the model's output."""
        return self.loss.label(self.boundary(len(self.units)))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics besides the loss, the main one first; () if the loss is the only metric."""
        return metrics_of(self.loss, self.boundary(len(self.units)))


def cut_to(sample: TensorSpec, length: int) -> TensorSpec:
    """Return the spec of the first ``length`` entries (along the first dimension) of a sample."""
    return TensorSpec((length, *sample.shape[1:]), sample.dtype, sample.below, sample.ignored)


def sequential(units: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Return an ``nn.Sequential`` with the children, given as pairs (name, module), in order."""
    return nn.Sequential(OrderedDict(units))


CONSTANT = "edgefl_constant"
"""Attribute that marks a non-persistent buffer, which a graph may contain as a constant of any size."""


def skeleton(module: nn.Sequential, *, training: bool) -> nn.Sequential:
    """Return a copy of ``module`` whose state tensors are on the meta device, where they have shapes but no values.

    A graph that is traced from it does not contain them as constants. A tensor with several uses stays one tensor.
    Non-persistent buffers (constants such as position ids) keep their values.

    Args:
        module: Units.
        training: Mode of the copy (:func:`edgefl.models.modes.set_mode`).
    """
    # A deep copy takes tensors from its memo, so that no value is copied.
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        for part in module.modules()
        for parameter in (*part._parameters.values(), *part._buffers.values())
        if isinstance(parameter, nn.Parameter)
    }
    bare = copy_module(module, memo)
    for part in bare.modules():
        for name, buffer in part._buffers.items():
            if buffer is None or isinstance(buffer, nn.Parameter):
                continue
            if name in part._non_persistent_buffers_set:
                setattr(buffer, CONSTANT, True)
            else:
                part._buffers[name] = buffer.to("meta")
    set_mode(bare, training=training)
    return bare


def on_meta(module: nn.Sequential) -> nn.Sequential:
    """Return a copy of ``module`` on the meta device, where tensors have shapes but no values.

    Counters, which :mod:`edgefl.models.counters` stores as floats, are integers again.
    """
    tensors = [*module.parameters(), *module.buffers()]
    # A deep copy takes tensors from its memo, so that no value is copied.
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(tensor.to("meta"), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in tensors
    }
    made = copy_module(module, memo).to("meta")
    restore_counters(made)
    return made


def _autocast_anywhere(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Initialize ``torch.autocast``, for the meta device as if it were the CPU; the replacement of its ``__init__``."""
    _autocast_init(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)


_autocast_init = torch.autocast.__init__
_autocast = ThreadPatch()
_autocast.replace(torch.autocast, "__init__", _autocast_anywhere)


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Prepare the ``with`` block to run ``module`` on the meta device, and restore the module's Python state afterwards.

    ``module`` itself is on the meta device, as :func:`on_meta` returns it. In the block, tensors that its code makes
    without a device are on the meta device too, and ``torch.autocast(x.device.type)`` is accepted.
    """
    with on_meta_device(), TraceableMode() as mode, _autocast(), restored_state(module) as held:
        for tensor, original in move_to_meta(held):
            mode.set_values(tensor, original)
        with without_new(module):
            yield


def run_fake(module: nn.Module, sample: TensorSpec, watch: BufferWatch | None = None) -> object:
    """Run ``module`` in its current modes on a batch of three samples without values.

    Returns the output, fake tensors of torch: they have shapes but no values. Exceptions of the module are not converted.

    Args:
        module: Module. Its buffers do not change.
        sample: Spec of one sample of its input.
        watch: Mode that records how the run uses buffers, or None.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, restored_state(module):
        # In-place operations must not reach the module's own buffers.
        own = (*module.named_parameters(), *module.named_buffers())
        tensors: dict[str, Tensor] = {name: mode.from_tensor(each) for name, each in own}
        # Before the mode below, because it takes tensors made inside for constants.
        x = sample.rows(3).zeros()
        with TraceableMode(), nullcontext() if watch is None else watch.watch(tensors):
            return torch.func.functional_call(module, tensors, (x,))


def output_spec(module: nn.Sequential, sample: TensorSpec) -> TensorSpec:
    """Return shape and dtype of one output sample of the units (stages of the model) ``module``, without batch dimension.

    Runs the units on the meta device. Without units, return ``sample``.

    Args:
        module: Units.
        sample: Spec of one sample of the input.

    Raises:
        ModelError: A unit cannot read the output of the one before, or returns no tensor.
    """
    if len(module) == 0:
        return sample
    # Two rows: with one, batch statistics of a channel could have a single value, which torch refuses.
    out = run_meta(module, sample, 2)
    return TensorSpec(tuple(out.shape[1:]), out.dtype)


def run_meta(module: nn.Sequential, sample: TensorSpec, batch: int) -> Tensor:
    """Run the units (stages of the model) in inference mode on the meta device and return the output, which has a
    shape but no values.

    Args:
        module: Units. They are copied without their values.
        sample: Spec of one sample of the input.
        batch: Number of samples.

    Raises:
        ModelError: A unit cannot read the output of the one before, or returns no tensor. The message names it.
    """
    bare = on_meta(module).eval()
    with without_values(bare):
        return run_units(bare, torch.empty((batch, *sample.shape), dtype=sample.dtype, device="meta"))


def run_units(units: nn.Sequential, x: Tensor) -> Tensor:
    """Run the units (stages of the model) one after the other on the batch ``x`` and return the last output.

    Exporters recognize this function by its name in stack traces, to find the user's line of an operation.

    Raises:
        ModelError: A unit cannot read the output of the one before, or returns no tensor. The message names it.
    """
    for name, unit in units.named_children():
        shape = f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
        with user_errors(f"unit {name!r} cannot read samples of shape {shape}"):
            x = unit(x)
        if not isinstance(x, Tensor):
            raise ModelError(
                f"unit {name!r} returns {type(x).__name__}; a unit maps one tensor to one tensor", unit=name
            )
    return x
