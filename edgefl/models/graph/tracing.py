"""A module's forward as one graph of ATen operations, in which chosen submodules stay closed: one call, one node.

``torch.export`` runs the module's Python on tensors without values, so that any control flow that does not depend
on data is followed, and keeps the batch size a symbol. A closed submodule appears as a call of the operator
``edgefl::closed``, which a unit turns back into a call of the submodule itself: its weights keep their names, its
behaviour in training and inference, its statistics and its noise stay its own. A function with a gradient of its own is
closed too, as a submodule that the trace adds.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.caches import forgotten
from edgefl.models.draws.generators import watched
from edgefl.models.draws.steering import Steered
from edgefl.models.graph.calls import (
    OPERATOR,
    Call,
    Recorder,
    applying,
    closing,
    learned,
    observed,
    recorders,
    requires_gradient,
)
from edgefl.models.graph.output import Output, giving
from edgefl.models.graph.plain import arguments, cleaned, free_fillings
from edgefl.models.layers.storage import reshaped, without_new
from edgefl.models.layers.torch_recurrent import recurring
from edgefl.models.own_gradients import differentiable
from edgefl.models.user_code import NO_VALUES, blamed, place
from edgefl.system.collecting import collecting_later

# Two rows: torch takes a size of one for a constant.
_ROWS = 2
# No size of a model is a multiple of it.
_MANY = 61
_NOISY = tuple(
    logging.getLogger(name)
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
)
# Layers that gather their weights into a list each time they are called, as nn.RNN does: no state is lost.
_ASKED = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
# What ends the way of a gradient.
_ENDS = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_ASSIGNED = r"The tensor attributes? .* assigned during export"


@dataclass(frozen=True, eq=False)
class Traced:
    """The graph of ``root``: placeholders, operations and one output, every node with ``meta["val"]``.

    ``source`` is the placeholder of the input, ``result`` the node of the returned tensor. ``state`` names the
    tensor of ``root.state_dict()`` behind a placeholder; ``constants`` holds the others. ``asked_mode``: code outside of
    closed submodules asked whether it is in training.
    """

    root: nn.Module
    graph: fx.Graph
    source: fx.Node
    result: fx.Node
    state: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    calls: tuple[Call, ...]
    asked_mode: bool

    def call(self, node: fx.Node) -> Call | None:
        """The call of a closed submodule that ``node`` is, if it is one."""
        return self.calls[arguments(node)[1]] if node.target is OPERATOR else None

    def label(self, node: fx.Node) -> str:
        """What people know ``node`` by: the closed submodule whose result it is, or the operation."""
        call = self.call(arguments(node)[0] if node.target is operator.getitem else node)
        return call.path if call is not None else node.name

    def described(self) -> list[str]:
        """A line for each operation and its arguments, the same for graphs that compute the same in the same order."""
        numbers = {node: f"%{number}" for number, node in enumerate(self._operations())}
        return [self._line(node, numbers) for node in numbers]

    def _operations(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def _line(self, node: fx.Node, numbers: Mapping[fx.Node, str]) -> str:
        call = self.call(node)
        # The flag of F.dropout is what its layer decides by its own mode.
        args = node.args[:2] if node.target is torch.ops.aten.dropout.default else node.args
        inputs = pytree.tree_map(lambda leaf: numbers.get(leaf, str(leaf)), (args, dict(node.kwargs)))
        return (
            f"{call.path}{call.arguments} of {inputs[0][0]}" if call is not None else f"{node.target}{inputs}"
        )


def trace(
    root: nn.Module,
    sample: TensorSpec,
    closed: Callable[[str, nn.Module], bool],
    output: Output = None,
    *,
    sketched: bool = False,
) -> Traced:
    """Trace ``root`` on a batch of ``sample``, in its present mode, with the submodules ``closed(path, module)`` closed.
    ``sketched``: on a batch of one size, in half the time, to look at and not to run.

    A submodule that is given or returns anything but tensors and plain constants is opened all the same. Of what ``root``
    returns, ``output`` is the result. Raises ModelError, with torch's reason and the line of the user's code, if ``root``
    cannot be traced, or if there is no such tensor.
    """
    recorder = Recorder()
    own = partial(applying, root, recorder)
    with (
        recurring(),  # before the forward of any layer is looked up
        giving(root, output),
        closing(root, closed, recorder),
        observed(root, recorder),
        differentiable(own),
    ):
        algorithm = exported(root, sample, sketched=sketched)
    return _traced(root, algorithm, recorder)


def exported(root: nn.Module, *samples: TensorSpec, sketched: bool = False) -> ExportedProgram:
    """``root`` on batches of ``samples`` by torch.export, the batch size a symbol; ModelError as :func:`trace`."""
    rows = _MANY if sketched else _ROWS
    inputs = tuple(torch.zeros((rows, *sample.shape), dtype=sample.dtype) for sample in samples)
    dynamic = None if sketched else _dynamic(root, len(inputs))
    what = f"cannot trace {type(root).__name__} on samples of shape {samples[0].shape}"
    with (
        _told(what),
        _quiet(),
        collecting_later(),
        watched(root),
        forgotten(root),
        without_new(root),
        _Unhooked(),
    ):
        return torch.export.export(root, inputs, dynamic_shapes=dynamic, strict=False)


def _dynamic(root: nn.Module, inputs: int) -> Any:
    """Return the dynamic sizes of ``inputs`` tensors as torch.export takes them: ``forward(self, *xs)`` has one entry."""
    sizes = ({0: Dim("batch")},) * inputs
    parameters = list(signature(root.forward).parameters.values())
    gathered = parameters and parameters[0].kind is Parameter.VAR_POSITIONAL
    return {parameters[0].name: sizes} if gathered else sizes


class _Unhooked(Steered):
    """Refuses hooks on tensors, which change gradients where no graph sees it. Code that asks whether a tensor requires a
    gradient is told what it is in training: what weights that are trained had a part in does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _ASKED:
            return requires_gradient(args)
        if func is Tensor.register_hook and not (recorders and recorders[-1].inside):
            raise ModelError(
                f"register_hook changes a gradient where no graph sees it{place()}; write a torch.autograd.Function, or put "
                "it into a submodule that no cut opens"
            )
        result = super().__torch_function__(func, types, args, kwargs)
        if func not in _ENDS and requires_gradient((args, kwargs or {})):
            learned(result)
        return result


@contextmanager
def _told(what: str) -> Iterator[None]:
    """As :func:`blamed`, but short and with a remedy where the code is right and torch cannot follow it."""
    try:
        with blamed(what):
            yield
    except ModelError as error:
        cause, source = error.__cause__, error.details.get("source")
        if not type(cause).__module__.startswith("torch."):
            raise
        fixed = "Constraints violated" in str(cause)
        reason = "its code turns the batch size into a constant" if fixed else str(cause).partition("\n")[0]
        at = f" (at {source})" if source else ""
        raise ModelError(f"{what}: {reason}{at}. {NO_VALUES}", source=source) from cause


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and writes to stderr before it raises: a traceback, advice for itself and its graph."""
    before = {log: log.disabled for log in _NOISY}
    written = io.StringIO()
    try:
        for log in before:
            log.disabled = True
        with redirect_stderr(written), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ASSIGNED)
            yield
        sys.stderr.write(written.getvalue())
    finally:
        for log, disabled in before.items():
            log.disabled = disabled


def _traced(root: nn.Module, algorithm: ExportedProgram, recorder: Recorder) -> Traced:
    module = algorithm.graph_module
    graph = cleaned(module)
    (results,) = arguments(graph.output_node())
    outputs = algorithm.graph_signature.user_outputs
    result = next((node for node in results if outputs and node.name == outputs[0]), None)
    if len(outputs) != 1 or not isinstance(result, fx.Node):
        raise ModelError(f"the output of {type(root).__name__} is not computed from its input", refused=True)
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    state: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    source = None
    names = set(root.state_dict())
    for spec in algorithm.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            source = node
        elif spec.target in names:
            state[node] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            constants[node] = root.get_buffer(str(spec.target))
        else:
            constants[node] = algorithm.constants[str(spec.target)]
    buffers = {
        placeholders[spec.arg.name]: str(spec.target)
        for spec in algorithm.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER
    }
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in buffers:
            before, now = (each.meta["val"] for each in arguments(node)[:2])
            if not _fits(now.shape, before.shape):
                raise reshaped(f"buffer {buffers[node.args[0]]!r}", before, now)
    assert source is not None
    free_fillings(graph, source)
    return Traced(root, graph, source, result, state, constants, tuple(recorder.calls), recorder.asked_mode)


def _fits(shape: torch.Size, room: torch.Size) -> bool:
    """Return True if values of ``shape`` can be written to a buffer of the shape ``room``."""
    sizes = zip(reversed(shape), reversed(room), strict=False)
    return len(shape) <= len(room) and all(type(size) is int and size in (1, whole) for size, whole in sizes)
