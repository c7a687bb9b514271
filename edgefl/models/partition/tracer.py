"""Tracer of a module: its forward as one graph of ATen operations, in which each call of a leaf module is one node.

``torch.export`` runs the module's Python code on tensors without values, and keeps the batch size symbolic. So control
flow is followed if it does not depend on data. A leaf module appears as a call of the operator ``edgefl::leaf_module``.
A unit turns it back into a call of the submodule itself, which keeps its weight names, modes, statistics and noise. A
``torch.autograd.Function`` of the user also becomes a leaf module, because its own gradient would be lost otherwise.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._pytree import GetAttrKey, SequenceKey
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.modes import in_mode
from edgefl.models.partition.normalize import arguments, fill_by_size, normalize
from edgefl.models.partition.output import Output, output_only, replaced_call
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.torch_functions.autograd_functions import FunctionLayer, Kind, differentiable
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.python_random import patched_generators
from edgefl.models.torch_functions.recurrent import PaddedSequence, recurring
from edgefl.models.torch_functions.storage import shape_error, without_new
from edgefl.models.user_code import NO_VALUES, at_line, defined_at, user_errors
from edgefl.system.memory import without_collector

# Two rows: torch takes a size of one for a constant.
_ROWS = 2
# No size of a model is a multiple of it, so the batch is recognized in a graph without symbols.
_SKETCH_ROWS = 61
_NOISY_LOGS = tuple(
    logging.getLogger(name)
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
)
# Layers as nn.RNN gather their weights into a list each time they are called; no state is lost by that.
_ASSIGNED_WARNING = r"The tensor attributes? .* assigned during export"
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
# Functions whose result has no gradient.
_DETACHING = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
# Attributes of a module that differ from call to call although its user changed nothing.
_UNSTEADY = frozenset({"_call_impl", "_flat_weights", "_flat_weight_refs"})


@dataclass(frozen=True)
class LeafCall:
    """One call of a leaf module (a submodule that a trace does not enter).

    Attributes:
        path: Path of the submodule.
        arguments: Pair (args, kwargs), with a :class:`TensorSlot` instead of each tensor.
        results: Position of each returned tensor: () for a single tensor, (1, 0) for the first one of a second tuple.
    """

    path: str
    arguments: Any
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor in :attr:`LeafCall.arguments`. Its index is the position among the tensors of the call."""

    index: int


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """Graph of a module: placeholders, operations and one output. The value of each node is in ``meta["val"]``.

    Attributes:
        root: Module that was traced.
        graph: Its operations. The call of a leaf module, which the trace does not enter, is one operation.
        source: Placeholder of the input.
        result: Node of the returned tensor.
        state: Name in ``root.state_dict()`` of each placeholder of a state tensor.
        constants: Value of each other placeholder.
        calls: Calls of leaf modules. The nodes refer to them by index.
        reads_mode: True if code outside of leaf modules read ``training``.
    """

    root: nn.Module
    graph: fx.Graph
    source: fx.Node
    result: fx.Node
    state: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    calls: tuple[LeafCall, ...]
    reads_mode: bool

    def leaf_call(self, node: fx.Node) -> LeafCall | None:
        """Return the call of a leaf module (submodule that a trace does not enter) that ``node`` represents, or None
        for another node.
        """
        return self.calls[arguments(node)[1]] if node.target is _LEAF_OPERATOR else None

    def label(self, node: fx.Node) -> str:
        """Return a name of ``node`` for error texts: the path of the leaf module (submodule that a trace does not
        enter) that returned it, or the node's own name.
        """
        call = self.leaf_call(arguments(node)[0] if node.target is operator.getitem else node)
        return call.path if call is not None else node.name

    def operations(self) -> list[fx.Node]:
        """Return all operations in order: calls of functions and of leaf modules (submodules that a trace does not
        enter), without placeholders and output.
        """
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def describe(self) -> list[str]:
        """Return one line per operation with its arguments.

        Two traces with equal lists compute the same in the same order.
        """
        numbers = {node: f"%{number}" for number, node in enumerate(self.operations())}
        lines = []
        for node in numbers:
            call = self.leaf_call(node)
            # Not the flag of F.dropout, because the layer that replaces it has a mode of its own.
            args = node.args[:2] if node.target is torch.ops.aten.dropout.default else node.args
            inputs = pytree.tree_map(lambda leaf: numbers.get(leaf, str(leaf)), (args, dict(node.kwargs)))
            lines.append(
                f"{node.target}{inputs}" if call is None else f"{call.path}{call.arguments} of {inputs[0][0]}"
            )
        return lines


class _LeafForward(nn.Module):
    """Recorded call of a leaf module (submodule that a trace does not enter), which :meth:`run` repeats with other
    tensors.
    """

    def __init__(self, module: nn.Module, original: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.module, self.original = module, original
        self.leaves, self.spec = leaves, spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def run(self, tensors: list[Tensor]) -> Any:
        """Repeat the call with ``tensors`` instead of the recorded ones and return its result."""
        queue = iter(tensors)
        filled = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        # A buffer that forward binds to another tensor would keep one without values; functional_call restores it.
        with TraceableMode():  # torch leaves the outer mode while it handles the call of the operator
            return torch.func.functional_call(self, state, args, kwargs)


@dataclass
class _TraceRecord:
    """State of a trace in progress.

    Attributes:
        calls: Calls of leaf modules (submodules that a trace does not enter) so far.
        forwards: Recorded call for each of ``calls``, in the same order.
        applied: Number of calls of each class of autograd functions, by name of the class.
        returned: Value that the last leaf module returned.
        in_leaf: True while a leaf module runs.
        reads_mode: True if code outside of leaf modules read its mode.
        trained: Tensors that require a gradient in training. Tensors of an export do not have that flag.
        states: State of each leaf module when the root was called, as :func:`_state_of` returns it.
    """

    calls: list[LeafCall] = field(default_factory=list)
    forwards: list[_LeafForward] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    returned: Any = None
    in_leaf: bool = False
    reads_mode: bool = False
    trained: Any = field(default_factory=WeakTensorKeyDictionary)
    states: dict[nn.Module, Hashable] = field(default_factory=dict)

    def mark_trained(self, values: Any) -> None:
        """Record the floating tensors in ``values`` as requiring a gradient, unless gradients are disabled."""
        if torch.is_grad_enabled():
            for leaf in pytree.tree_leaves(values):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self.trained[leaf] = True


# Record of the trace that runs in this thread: torch calls the operator below and the mode without it.
_active: ContextVar[_TraceRecord | None] = ContextVar("active", default=None)


@torch.library.custom_op("edgefl::leaf_module", mutates_args=())
def _call_leaf(tensors: list[Tensor], index: int) -> list[Tensor]:
    """Call the leaf module (submodule that a trace does not enter) of the recorded call number ``index`` with
    ``tensors``, and return the tensors that it returns.

    The operator exists only in graphs and never runs on values.
    """
    raise NotImplementedError


@_call_leaf.register_fake
def _(tensors: list[Tensor], index: int) -> list[Tensor]:
    record = _active.get()
    assert record is not None
    record.in_leaf = True
    try:
        record.returned = record.forwards[index].run(tensors)
    finally:
        record.in_leaf = False
    outputs = [value for value in pytree.tree_leaves(record.returned) if isinstance(value, Tensor)]
    return [torch.empty_like(value) for value in outputs]


_LEAF_OPERATOR = torch.ops.edgefl.leaf_module.default


class ModuleTracer:
    """Tracer of a module on batches of one kind of sample.

    A leaf module is traced into if a call has arguments or results other than tensors and plain constants. So is one
    whose weights, attributes or mode were changed since ``root`` was called, because the unit (stage of the model)
    would not repeat that change.

    Args:
        root: Module.
        sample: Spec of one sample of its input, without batch dimension.
        leaf_modules: Paths of the submodules whose calls become one node.
        output: Selects the output among several returned tensors.
    """

    def __init__(
        self, root: nn.Module, sample: TensorSpec, leaf_modules: Collection[str], output: Output = None
    ) -> None:
        self._root, self._sample, self._output = root, sample, output
        self._leaves = [
            (path, module)
            for path, module in root.named_modules()
            if path
            and path in leaf_modules
            and not isinstance(module, nn.ModuleList | nn.ModuleDict | FunctionLayer)
        ]
        self._record = _TraceRecord()

    def trace(self, *, training: bool, sketched: bool = False) -> TracedGraph:
        """Return the graph of the module in training or inference.

        Args:
            training: Mode of the module. Marked parts stay in inference mode (:mod:`edgefl.models.modes`).
            sketched: Trace with a fixed batch size, which takes half the time. Such a graph can be inspected but not
                run.

        Raises:
            ModelError: The module cannot be traced (with torch's reason and the line of the user's code), or does not
                return the output.
        """
        self._record = _TraceRecord()
        with in_mode(self._root, training=training), self._patched():
            program = export_module(self._root, self._sample, sketched=sketched)
        return _read_program(self._root, program, self._record)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Replace the functions of torch and of the root that would hide calls or modes, for the ``with`` block."""
        with ExitStack() as stack:
            # Torch's recurrent layers run step by step; before the forward of any layer is looked up below.
            stack.enter_context(recurring())
            # The root returns its output alone, after its hooks ran.
            stack.enter_context(output_only(self._root, self._output))
            # The operator and _TracedMode find the record here. A list would mix up threads.
            stack.callback(_active.reset, _active.set(self._record))
            # A call of the root notes the state of all leaf modules first.
            stack.enter_context(replaced_call(self._root, self._calling_root(self._root._call_impl)))
            # Each leaf module, with its hooks, becomes one call of the operator.
            for path, module in self._leaves:
                call = self._leaf_forward(path, module, module._call_impl)
                stack.enter_context(replaced_call(module, call))
            # A property of nn.Module hides the attribute `training`, and so sees who reads it.
            stack.enter_context(self._observed_mode())
            # torch.autograd.Function.apply becomes a call of a leaf module.
            stack.enter_context(differentiable(self._apply_function))
            yield

    def _calling_root(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``call``, the root's call, that first records the state of all leaf modules (submodules
        that a trace does not enter).
        """

        def call_root(*args: Any, **kwargs: Any) -> Any:
            self._record.states = {module: _state_of(module) for _, module in self._leaves}
            return call(*args, **kwargs)

        return call_root

    @contextmanager
    def _observed_mode(self) -> Iterator[None]:
        """Record reads of ``training`` by replacing the attribute of ``nn.Module`` by a property, for the ``with``
        block.
        """
        parts, record = {id(part) for part in self._root.modules()}, self._record

        def read(module: nn.Module) -> bool:
            record.reads_mode |= id(module) in parts and not record.in_leaf
            return bool(module.__dict__["training"])

        def write(module: nn.Module, training: bool) -> None:
            module.__dict__["training"] = training

        nn.Module.training = property(read, write)  # type: ignore[assignment]
        try:
            yield
        finally:
            del nn.Module.training

    def _apply_function(self, kind: Kind, args: tuple[Any, ...]) -> Any:
        """Apply the autograd function ``kind`` to ``args`` as a call of a leaf module (submodule that a trace does not
        enter), and return its result.

        The leaf module is added to the root. Inside of another leaf module, the function is applied as usual.

        Raises:
            ModelError: An argument or result is neither a tensor nor a plain constant.
        """
        record = self._record
        if record.in_leaf:
            return kind.apply(*args)
        name = f"{kind.__name__}_{record.applied[kind.__name__]}"
        record.applied[kind.__name__] += 1
        layer = self._root._modules.get(name)
        # The layer of an earlier trace is used again.
        if not isinstance(layer, FunctionLayer) or layer.kind is not kind:
            layer = FunctionLayer(kind)
            self._root.add_module(name, layer)
        recorded = len(record.calls)
        result = self._leaf_forward(name, layer, layer.forward)(*args)
        if len(record.calls) == recorded or not _is_plain_result(record.returned):
            source = defined_at(kind)
            raise ModelError(
                f"{kind.__name__} has a gradient of its own, and is given or returns something that is no tensor and no "
                f"plain constant{f' (at {source})' if source else ''}; give it tensors alone",
                function=kind.__name__,
            )
        return result

    def _leaf_forward(self, path: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that replaces ``original``, the call of the leaf module ``module`` at ``path``.

        It records the call and makes it one operation of the graph. If the call cannot be such an operation, it runs
        ``original``.
        """
        record = self._record

        def call_leaf(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if record.in_leaf or not all(_is_plain(leaf) for leaf in leaves):
                return original(*args, **kwargs)
            if module in record.states and record.states[module] != _state_of(module):
                return original(*args, **kwargs)

            numbers = iter(range(len(leaves)))
            slots = [TensorSlot(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            record.forwards.append(_LeafForward(module, original, leaves, spec))
            record.calls.append(LeafCall(path, pytree.tree_unflatten(slots, spec), ()))
            index = len(record.calls) - 1
            outputs = _call_leaf([leaf for leaf in leaves if isinstance(leaf, Tensor)], index)
            if not _is_plain_result(record.returned):
                return original(*args, **kwargs)
            # Build what the leaf module returned of the operator's results, and note the position of each.
            flat, returned_spec = pytree.tree_flatten_with_path(record.returned)
            positions = tuple(tuple(map(_position, keys)) for keys, leaf in flat if isinstance(leaf, Tensor))
            record.calls[index] = LeafCall(path, record.calls[index].arguments, positions)
            queue = iter(outputs)
            result = pytree.tree_unflatten(
                [next(queue) if isinstance(leaf, Tensor) else leaf for _, leaf in flat], returned_spec
            )
            if any(parameter.requires_grad for parameter in module.parameters()):
                record.mark_trained(result)
            return result

        return call_leaf


def _state_of(module: nn.Module) -> Hashable:
    """Return a key of all modes, attributes and tensors of a module and its parts, by identity.

    Two keys are equal if none was replaced in between.
    """
    return tuple(
        (name, _identity(value))
        for part in module.modules()
        for group in (part.__dict__, part._parameters, part._buffers, part._modules)
        for name, value in group.items()
        if name not in _UNSTEADY
    )


def _identity(value: object) -> Hashable:
    """Return a hashable key of a value: a plain constant itself, the ``id`` of each item of a container, or the ``id``."""
    if isinstance(value, list | tuple):
        return tuple(map(id, value))
    if isinstance(value, dict):
        return tuple((str(key), id(each)) for key, each in value.items())
    return value if isinstance(value, bool | int | float | str) else id(value)


def _is_plain(leaf: object) -> bool:
    # A symbolic size is no int here: the call would hold this batch's size.
    return leaf is None or isinstance(leaf, Tensor | torch.dtype) or type(leaf) in (bool, int, float, str)


def _is_plain_result(value: Any) -> bool:
    if type(value) in (tuple, list, PaddedSequence):
        return all(map(_is_plain_result, value))
    return value is None or isinstance(value, Tensor)


def _position(key: object) -> int:
    assert isinstance(key, SequenceKey | GetAttrKey)
    return key.idx if isinstance(key, SequenceKey) else PaddedSequence._fields.index(key.name)


def export_module(root: nn.Module, *samples: TensorSpec, sketched: bool = False) -> ExportedProgram:
    """Export a module by ``torch.export``, with a symbolic batch size.

    Args:
        root: Module, in the mode to export.
        samples: Spec of one sample of each input of its forward, without batch dimension.
        sketched: Export with a fixed batch size, which takes half the time.

    Raises:
        ModelError: The module cannot be exported. The message has torch's reason and the line of the user's code.
    """
    rows = _SKETCH_ROWS if sketched else _ROWS
    inputs = tuple(torch.zeros((rows, *sample.shape), dtype=sample.dtype) for sample in samples)
    sizes: Any = ({0: Dim("batch")},) * len(inputs)
    parameters = list(signature(root.forward).parameters.values())
    if parameters and parameters[0].kind is Parameter.VAR_POSITIONAL:  # forward(self, *xs) has one entry
        sizes = {parameters[0].name: sizes}
    action = f"cannot trace {type(root).__name__} on samples of shape {samples[0].shape}"
    with _explain_errors(action), _prepare_export(root):
        return torch.export.export(root, inputs, dynamic_shapes=None if sketched else sizes, strict=False)


@contextmanager
def _prepare_export(root: nn.Module) -> Iterator[None]:
    """Prepare Python and torch for the export of ``root``, and restore them afterwards."""
    with ExitStack() as stack:
        # Torch logs a traceback, and writes advice for its own graph, before it raises; the error repeats what matters.
        for log in _NOISY_LOGS:
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        written = stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _ASSIGNED_WARNING)
        # The cyclic collector would walk through all nodes again and again.
        stack.enter_context(without_collector())
        # Draws of Python's and numpy's generators would be constants of the graph.
        stack.enter_context(patched_generators(root))
        # The module's code caches and counts; tensors without values must not stay there.
        stack.enter_context(restored_state(root))
        # A parameter that forward makes would be no part of the state.
        stack.enter_context(without_new(root))
        # Functions of torch that no graph can hold are rewritten or refused.
        stack.enter_context(_TracedMode())
        yield
    sys.stderr.write(written.getvalue())


class _TracedMode(TraceableMode):
    """Mode of an export. It rejects hooks on tensors, and returns for ``requires_grad`` the value of a training run.

    A tensor requires a gradient in training if a trained weight contributed to it. Tensors of an export never require
    one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = _active.get()
        if func == _REQUIRES_GRAD:
            return _requires_gradient(args, record)
        if func is Tensor.register_hook and not (record is not None and record.in_leaf):
            raise ModelError(
                f"register_hook changes a gradient where no graph sees it{at_line()}; write a torch.autograd.Function, or "
                "put it into a submodule that no cut opens"
            )
        result = super().__torch_function__(func, types, args, kwargs)
        if record is not None and func not in _DETACHING and _requires_gradient((args, kwargs or {}), record):
            record.mark_trained(result)
        return result


def _requires_gradient(values: Any, record: _TraceRecord | None) -> bool:
    """Return True if a tensor in ``values``, at any depth, requires a gradient, or would in training.

    ``record`` has the tensors that would; None: only the flags of the tensors count.
    """
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return any(each.requires_grad or (record is not None and each in record.trained) for each in tensors)


@contextmanager
def _explain_errors(action: str) -> Iterator[None]:
    """Convert exceptions of the ``with`` block to ModelError like :func:`user_errors`. The text begins with ``action``.

    If torch itself cannot trace the code, the text is shorter than torch's.
    """
    try:
        with user_errors(action):
            yield
    except ModelError as error:
        cause, source = error.__cause__, error.details.get("source")
        if not type(cause).__module__.startswith("torch."):
            raise
        fixed = "Constraints violated" in str(cause)
        reason = "its code turns the batch size into a constant" if fixed else str(cause).partition("\n")[0]
        at = f" (at {source})" if source else ""
        raise ModelError(f"{action}: {reason}{at}. {NO_VALUES}", source=source) from cause


def _read_program(root: nn.Module, program: ExportedProgram, record: _TraceRecord) -> TracedGraph:
    """Return the traced graph of an exported program.

    Args:
        root: Module that was exported.
        program: Result of ``torch.export``.
        record: Record of the trace, with its calls of leaf modules (submodules that a trace does not enter).

    Raises:
        ModelError: The output does not depend on the input, or a buffer changes its shape.
    """
    graph = normalize(program.graph_module)
    (results,) = arguments(graph.output_node())
    outputs = program.graph_signature.user_outputs
    result = next((node for node in results if outputs and node.name == outputs[0]), None)
    if len(outputs) != 1 or not isinstance(result, fx.Node):
        raise ModelError(f"the output of {type(root).__name__} is not computed from its input", refused=True)

    # Placeholders are the input, tensors of the state, or constants.
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    state: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    buffers: dict[fx.Node, str] = {}
    source = None
    names = set(root.state_dict())
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.BUFFER:
            buffers[node] = str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            source = node
        elif spec.target in names:
            state[node] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            constants[node] = root.get_buffer(str(spec.target))
        else:
            constants[node] = program.constants[str(spec.target)]

    # The value that a step writes to a buffer must fit there, or the next step would fail.
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in buffers:
            before, now = (each.meta["val"] for each in arguments(node)[:2])
            if not _fits(now.shape, before.shape):
                raise shape_error(f"buffer {buffers[node.args[0]]!r}", before, now)
    assert source is not None
    fill_by_size(graph, source)
    return TracedGraph(root, graph, source, result, state, constants, tuple(record.calls), record.reads_mode)


def _fits(shape: torch.Size, room: torch.Size) -> bool:
    """Return True if values of ``shape`` can be written to a buffer of shape ``room``."""
    sizes = zip(reversed(shape), reversed(room), strict=False)
    return len(shape) <= len(room) and all(type(size) is int and size in (1, whole) for size, whole in sizes)
