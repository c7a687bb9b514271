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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._pytree import SequenceKey

from edgefl.contract.tensors import TensorSpec
from edgefl.models.draws.steering import Steered, place
from edgefl.models.graph.output import Output, giving
from edgefl.models.graph.plain import arguments, cleaned, free_fillings
from edgefl.models.own_gradients import Applied, Kind, differentiable
from edgefl.models.user_code import NO_VALUES, blamed, defined_at
from edgefl.wire.errors import ModelError

# Two rows: torch takes a size of one for a constant.
_ROWS = 2
# No size of a model is a multiple of it.
_MANY = 61
_NOISY = tuple(
    logging.getLogger(name)
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
)
# Layers that gather their weights into a list each time they are called, as nn.RNN does: no state is lost.
_ASSIGNED = r"The tensor attributes? .* assigned during export"


@dataclass(frozen=True)
class Call:
    """One call of a closed submodule: ``arguments`` is (args, kwargs) with an index for each tensor.

    ``results`` holds the places of the returned tensors: () for a tensor, (1, 0) for the first of a second tuple.
    """

    path: str
    arguments: Any
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Slot:
    """Stands in :attr:`Call.arguments` for the tensor at this index."""

    index: int


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
        return self.calls[arguments(node)[1]] if node.target is _OPERATOR else None

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
    recorder = _Recorder()
    own = partial(_applied, root, recorder)
    with (
        giving(root, output),
        _closed(root, closed, recorder),
        _observed(root, recorder),
        differentiable(own),
    ):
        program = exported(root, sample, sketched=sketched)
    return _traced(root, program, recorder)


def exported(root: nn.Module, *samples: TensorSpec, sketched: bool = False) -> ExportedProgram:
    """``root`` on batches of ``samples`` by torch.export, the batch size a symbol; ModelError as :func:`trace`."""
    rows = _MANY if sketched else _ROWS
    inputs = tuple(torch.zeros((rows, *sample.shape), dtype=sample.dtype) for sample in samples)
    dynamic = None if sketched else ({0: Dim("batch")},) * len(inputs)
    what = f"cannot trace {type(root).__name__} on samples of shape {samples[0].shape}"
    with _told(what), _quiet(), _Unhooked():
        return torch.export.export(root, inputs, dynamic_shapes=dynamic, strict=False)


class _Unhooked(Steered):
    """Refuses hooks on tensors, which change gradients where no graph sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and not (_recorders and _recorders[-1].inside):
            raise ModelError(
                f"register_hook changes a gradient where no graph sees it{place()}; write a torch.autograd.Function, or put "
                "it into a submodule that no cut opens"
            )
        return super().__torch_function__(func, types, args, kwargs)


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


@dataclass
class _Recorder:
    """Calls of closed submodules seen so far; ``inside`` while one of them runs; whether other code asked for its mode."""

    calls: list[Call] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    running: list[Callable[[list[Tensor]], Any]] = field(default_factory=list)
    returned: Any = None
    inside: bool = False
    asked_mode: bool = False


_recorders: list[_Recorder] = []


@torch.library.custom_op("edgefl::closed", mutates_args=())
def _closed_call(tensors: list[Tensor], index: int) -> list[Tensor]:
    """Call number ``index`` of a closed submodule; exists in graphs only, never runs on values."""
    raise NotImplementedError


@_closed_call.register_fake
def _(tensors: list[Tensor], index: int) -> list[Tensor]:
    recorder = _recorders[-1]
    recorder.inside = True
    try:
        recorder.returned = recorder.running[index](tensors)
    finally:
        recorder.inside = False
    outputs = [value for value in pytree.tree_leaves(recorder.returned) if isinstance(value, Tensor)]
    return [torch.empty_like(value) for value in outputs]


_OPERATOR = torch.ops.edgefl.closed.default


@contextmanager
def _closed(root: nn.Module, closed: Callable[[str, nn.Module], bool], recorder: _Recorder) -> Iterator[None]:
    modules = [(path, module) for path, module in root.named_modules() if path and closed(path, module)]
    modules = [
        (path, module)
        for path, module in modules
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | Applied)
    ]
    own = {module: module.__dict__["forward"] for _, module in modules if "forward" in module.__dict__}
    _recorders.append(recorder)
    for path, module in modules:
        module.forward = _recording(path, module, module.forward, recorder)
    try:
        yield
    finally:
        _recorders.pop()
        for _, module in modules:
            del module.__dict__["forward"]
            if module in own:
                module.__dict__["forward"] = own[module]


def _applied(root: nn.Module, recorder: _Recorder, kind: Kind, args: tuple[Any, ...]) -> Any:
    """A function with a gradient of its own, as a closed submodule of ``root``: opened, it would lose that gradient."""
    if recorder.inside:
        return kind.apply(*args)
    name = f"{kind.__name__}_{recorder.applied[kind.__name__]}"
    recorder.applied[kind.__name__] += 1
    layer = root._modules.get(name)
    if not isinstance(layer, Applied) or layer.kind is not kind:  # not of an earlier trace
        layer = Applied(kind)
        root.add_module(name, layer)
    recorded = len(recorder.calls)
    result = _recording(name, layer, layer.forward, recorder)(*args)
    if len(recorder.calls) == recorded or not _is_plain_result(recorder.returned):
        raise ModelError(
            f"{kind.__name__} has a gradient of its own, and is given or returns something that is no tensor and no plain "
            f"constant{_at(kind)}; give it tensors alone",
            function=kind.__name__,
        )
    return result


def _at(kind: Kind) -> str:
    source = defined_at(kind)
    return f" (at {source})" if source else ""


@contextmanager
def _observed(root: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Inside, the recorder learns of who reads ``training`` of a part of ``root``: a property comes before what modules
    hold themselves."""
    parts = {id(part) for part in root.modules()}

    def read(module: nn.Module) -> bool:
        recorder.asked_mode |= id(module) in parts and not recorder.inside
        return bool(module.__dict__["training"])

    def write(module: nn.Module, training: bool) -> None:
        module.__dict__["training"] = training

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.training


def _recording(
    path: str, module: nn.Module, original: Callable[..., Any], recorder: _Recorder
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if recorder.inside or not all(_is_plain(leaf) for leaf in leaves):
            return original(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def run(given: list[Tensor]) -> Any:
            queue = iter(given)
            filled = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            # Rebound statistics must not stay behind; functional_call puts the module's own back.
            return torch.func.functional_call(
                _Shell(module, original), {f"module.{k}": v for k, v in state.items()}, args, kwargs
            )

        recorder.running.append(run)
        recorder.calls.append(Call(path, _slots(leaves, spec), ()))
        index = len(recorder.calls) - 1
        outputs = _closed_call(tensors, index)
        if not _is_plain_result(recorder.returned):
            return original(*args, **kwargs)
        return _returned(recorder, index, outputs)

    return forward


class _Shell(nn.Module):
    """Calls ``original`` while the tensors of ``module`` are replaced."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def _is_plain(leaf: object) -> bool:
    # A symbolic size is no int here: the call would hold this batch's size.
    return leaf is None or isinstance(leaf, Tensor | torch.dtype) or type(leaf) in (bool, int, float, str)


def _is_plain_result(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain_result, value))
    return value is None or isinstance(value, Tensor)


def _slots(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    numbers = iter(range(len(leaves)))
    return pytree.tree_unflatten(
        [Slot(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )


def _returned(recorder: _Recorder, index: int, found: list[Tensor]) -> Any:
    """What the closed submodule returned, built of the operator's results; notes where each one lies."""
    flat, spec = pytree.tree_flatten_with_path(recorder.returned)
    tensors = iter(found)
    places = tuple(
        tuple(key.idx for key in keys if isinstance(key, SequenceKey))
        for keys, leaf in flat
        if isinstance(leaf, Tensor)
    )
    call = recorder.calls[index]
    recorder.calls[index] = Call(call.path, call.arguments, places)
    return pytree.tree_unflatten(
        [next(tensors) if isinstance(leaf, Tensor) else leaf for _, leaf in flat], spec
    )


def _traced(root: nn.Module, program: ExportedProgram, recorder: _Recorder) -> Traced:
    module = program.graph_module
    graph = cleaned(module)
    (results,) = arguments(graph.output_node())
    outputs = program.graph_signature.user_outputs
    result = next((node for node in results if outputs and node.name == outputs[0]), None)
    if len(outputs) != 1 or not isinstance(result, fx.Node):
        raise ModelError(f"the output of {type(root).__name__} is not computed from its input")
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    state: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    source = None
    names = set(root.state_dict())
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            source = node
        elif spec.target in names:
            state[node] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            constants[node] = root.get_buffer(str(spec.target))
        else:
            constants[node] = program.constants[str(spec.target)]
    assert source is not None
    free_fillings(graph, source)
    return Traced(root, graph, source, result, state, constants, tuple(recorder.calls), recorder.asked_mode)
