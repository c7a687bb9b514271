"""Tracing: a pure function of named tensors becomes a graph of core ops. No other module traces.

Two passes. The first runs the function with its own calls to ``torch.autograd.grad`` and records forward,
backward and update as one graph. The second makes that graph functional (an in-place update of a running mean
becomes a new tensor) and rewrites training ops by the rules of :mod:`edgefl_export.decompositions`. Autograd is
gone by then, which is why one pass cannot do both. Last, what no output needs is removed::

    traced = trace(algorithm.phases[0].function)    # first pass
    lowered = decompose(traced)                     # second pass
    lowered.inputs, lowered.outputs                 # the ports that are left, in order
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._export.verifier import SpecViolationError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from edgefl.contract.algorithm import INPUT_ROLES, OUTPUT_ROLES, Function
from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.errors import EdgeflError, ExportError
from edgefl.submodels.channels.trace import plain_attention
from edgefl.system.memory import without_collector
from edgefl_export.capture.complex_pairs import NoComplexFormError, without_complex
from edgefl_export.capture.graph import LoweredGraph, Table, TracedFunction, graph_of
from edgefl_export.capture.nodes import PORT, copy_of, fake_value, read_inputs, results
from edgefl_export.capture.patches import patched
from edgefl_export.capture.refusals import (
    check_constants,
    check_ops,
    drop_outside_writes,
    untraceable,
    written_by,
)
from edgefl_export.capture.rewrites import rewrite_gradients
from edgefl_export.decompositions import core_table, first_table
from edgefl_export.operators import aten_ops

_aten = torch.ops.aten

# Gradients of clamps that compare the clamp's result, which often waits for the backward pass anyway, not its input.
#
# ReLU6 before a convolution: the weight's gradient reads the result. torch keeps the input too, a third of what MobileNet's
# blocks keep.

_BOUND_OF = {_aten.le.Scalar: 0, _aten.ge.Scalar: 1}
"""Which bound of the clamp a comparison has to name: x <= low where low is what the clamp gives, and x >= high."""


def compare_results(graph: fx.Graph) -> None:
    """Make comparisons of a clamped x with its bounds read the clamped value instead of x, in place.

    For y = hardtanh(x, low, high), x <= low becomes y <= low, and x >= high becomes y >= high. The result is equal for
    every float x, and x need not be kept.
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        place = _BOUND_OF.get(node.target)
        clamped = _clamp(node.args[0], place, node.args[1]) if place is not None else None
        if clamped is not None and clamped in seen:
            node.replace_input_with(node.args[0], clamped)
        seen.add(node)


def _clamp(value: object, place: int, bound: object) -> fx.Node | None:
    """Return an existing node that clamps ``value`` with ``bound`` as its lower (``place`` 0) or upper limit
    (``place`` 1).

    Return None if the graph has no such node.
    """
    if not isinstance(value, fx.Node):
        return None
    for user in value.users:
        if user.target is _aten.hardtanh.default and fake_value(user).is_floating_point():
            bounds = _bounds(user)
            if bounds is not None and bounds[0] < bounds[1] and bound == bounds[place]:
                return user
    return None


def _bounds(clamp: fx.Node) -> tuple[float, float] | None:
    match clamp.args[1:]:
        case ():
            return -1.0, 1.0
        case (int() | float() as low, int() | float() as high):
            return low, high
    return None


_SAME_VALUE = aten_ops("alias clone detach detach_ lift_fresh lift_fresh_copy")
_FLOAT = 0.5

_Flat = Callable[..., tuple[Tensor, ...]]


def capture(function: Function, table: Table | None = None) -> LoweredGraph:
    """Trace ``function`` and decompose it to core ops, both passes in one call.

    Args:
        function: pure function of named tensors; only the shapes and dtypes of its inputs are used, not its example.
        table: rules of the second pass; by default :func:`edgefl_export.decompositions.core_table`.

    Raises:
        ExportError: if the function cannot be compiled, as when it takes a Python value out of a tensor. The text of
            the error names the rule that it breaks.
    """
    return decompose(trace(function), table)


def trace(function: Function) -> TracedFunction:
    """Run ``function`` once and record each op, including those of gradients (first pass).

    The inputs are filled with a constant, because the graph may not depend on values.

    Raises:
        ExportError: if the function cannot be compiled, as when it takes a Python value out of a tensor. The text of
            the error names the rule that it breaks.
    """
    try:
        return _trace_at(function, 0)
    except ExportError as error:
        if "ZeroDivisionError" not in str(error.__cause__):
            raise
    return _trace_at(function, 1)  # the function divides by a whole number that it reads


def decompose(traced: TracedFunction, table: Table | None = None) -> LoweredGraph:
    """Remove in-place writes from a traced function and decompose its ops to core ops (second pass).

    Args:
        traced: result of :func:`trace`; its module is rewritten, so it cannot be used again.
        table: decompositions by op; by default :func:`edgefl_export.decompositions.core_table`.

    Raises:
        ExportError: if the function cannot be compiled, as when it draws random numbers. The text of the error names
            the rule that it breaks.
    """
    function, module = traced.function, traced.module
    module.graph.eliminate_dead_code(is_impure_node=_is_kept)  # draws that inference does not read, too
    check_ops(function, module)
    drop_outside_writes(function, module)
    table = core_table() if table is None else table
    _lift_written_constants(module.graph)
    rewrite_gradients(module, table)
    # Nothing runs there: what the arguments hold is never read.
    arguments = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in function.inputs.values())
    reals = without_complex(function, tuple(function.inputs), module)
    core = _trace(function, torch.func.functionalize(reals), arguments, table, fake=True)
    _drop_copies(core)
    compare_results(core.graph)
    core.graph.eliminate_dead_code()
    _separate_outputs(core)
    used = read_inputs(core.graph, function.inputs)
    for name, node in zip(used, core.graph.find_nodes(op="placeholder"), strict=True):
        node.meta[PORT] = name
    check_constants(function, module, core)
    core.recompile()
    return LoweredGraph(
        function=function,
        module=core,
        inputs={name: function.inputs[name] for name in used},
        outputs=traced.outputs,
        unused=tuple(name for name in function.inputs if name not in used),
    )


def _is_kept(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(written_by(node))


def _lift_written_constants(graph: fx.Graph) -> None:
    """Insert ``lift_fresh`` before constants that are written to, such as a clone of a mask.

    The second pass removes in-place writes only for tensors that come from an input or from that op.
    """
    reached = [written for node in graph.nodes for written in written_by(node)]
    seen: set[fx.Node] = set()
    while reached:
        node = reached.pop()
        if node in seen:
            continue
        seen.add(node)
        reached += node.all_input_nodes
        if node.op == "get_attr":
            readers = list(node.users)
            with graph.inserting_after(node):
                lifted = graph.call_function(_aten.lift_fresh.default, (node,))
            lifted.meta = dict(node.meta)
            for reader in readers:
                reader.replace_input_with(node, lifted)


def _trace_at(function: Function, whole: int) -> TracedFunction:
    example = {name: _anything(spec, whole) for name, spec in function.inputs.items()}
    outputs: dict[str, TensorSpec] = {}

    def flat(*arguments: Tensor) -> tuple[Tensor, ...]:
        # Copies, so that a module that updates a buffer in place never reaches a graph input.
        result = function({name: value.clone() for name, value in zip(example, arguments, strict=True)})
        outputs.update(_checked_outputs(function, result))
        return tuple(result.values())

    with patched(), plain_attention():
        module = _trace(function, flat, tuple(example.values()), first_table(), fake=False)
    return TracedFunction(function, module, outputs)


def _anything(spec: TensorSpec, whole: int) -> Tensor:
    """Return a tensor of ``spec`` filled with one number: ``whole`` for integers, a positive constant for floats."""
    return torch.full(spec.shape, _FLOAT if spec.dtype.is_floating_point else whole, dtype=spec.dtype)


def exported_program(lowered: LoweredGraph) -> ExportedProgram:
    """Return the graph as an ExportedProgram: plain user inputs and outputs, constants as constant tensors.

    Built directly rather than by ``torch.export.export``, which would trace the graph once more. Every output is a
    USER_OUTPUT, because exporters drop gradients and losses of any other kind without an error.
    """
    graph, _ = copy_of(lowered.module.graph)
    constants = _constants_to_placeholders(graph, lowered.module)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = results(graph)
    signature = ExportGraphSignature(
        input_specs=[
            InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), constants[node.name])
            if node.name in constants
            else InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None)
            for node in nodes
        ],
        output_specs=[
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in outputs
        ],
    )
    _as_fake(nodes)
    values = {target: getattr(lowered.module, target) for target in constants.values()}
    try:
        return ExportedProgram(
            root=torch.nn.Module(),
            graph=graph,
            graph_signature=signature,
            state_dict={},
            range_constraints={},
            module_call_graph=[_call_entry(signature, len(lowered.inputs), len(outputs))],
            constants=values,
        )
    except SpecViolationError as error:
        raise ExportError(
            f"function {lowered.name!r} cannot be exported: expected operations that make new tensors, found one that "
            f"writes in place ({error}); write into a clone of the tensor, such as one by torch.where or torch.cat",
            function=lowered.name,
        ) from error


def _as_fake(placeholders: list[fx.Node]) -> None:
    """Replace the fake values of placeholders by tensors on the CPU without values, as torch's passes expect."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in placeholders:
        node.meta["val"] = FakeTensor(mode, fake_value(node), torch.device("cpu"))


def _call_entry(signature: ExportGraphSignature, inputs: int, outputs: int) -> ModuleCallEntry:
    user_inputs = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    call = ModuleCallSignature(
        inputs=user_inputs,
        outputs=[spec.arg for spec in signature.output_specs],
        in_spec=pytree.tree_structure((tuple(range(inputs)), {})),
        out_spec=pytree.tree_structure(tuple(range(outputs))),
    )
    return ModuleCallEntry(fqn="", signature=call)


def _constants_to_placeholders(graph: fx.Graph, module: fx.GraphModule) -> dict[str, str]:
    """Replace each ``get_attr`` node by a placeholder at the begin of ``graph``.

    Return the name of the attribute for each placeholder, by the placeholder's name.
    """
    placeholders: dict[str, fx.Node] = {}
    first = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in placeholders:
            with graph.inserting_before(first):
                placeholders[node.target] = graph.placeholder(f"c_{node.target}")
            placeholders[node.target].meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholders[node.target])
        graph.erase_node(node)
    return {node.name: target for target, node in placeholders.items()}


def _trace(
    function: Function, traced: _Flat, arguments: tuple[Tensor, ...], table: Table, *, fake: bool
) -> fx.GraphModule:
    try:
        return graph_of(traced, arguments, table, fake=fake)
    except EdgeflError:
        raise
    except NoComplexFormError as error:
        raise error.refusal(function) from None
    except Exception as error:
        raise untraceable(function, error) from error


def _checked_outputs(function: Function, result: object) -> dict[str, TensorSpec]:
    if not isinstance(result, dict) or not result:
        raise ExportError(
            f"function {function.name!r} must return a non-empty dict of tensors, got {type(result).__name__}",
            function=function.name,
        )
    bad = [name for name, value in result.items() if not isinstance(value, Tensor)]
    bad += [name for name in result if role_of(name) not in OUTPUT_ROLES]
    bad += [name for name in function.inputs if role_of(name) not in INPUT_ROLES]
    if bad:
        raise ExportError(
            f"function {function.name!r} has ports that are no tensors or carry no known role: {bad}; inputs have "
            f"the roles {sorted(INPUT_ROLES)}, outputs {sorted(OUTPUT_ROLES)}",
            function=function.name,
            ports=bad,
        )
    return {name: TensorSpec.of(value) for name, value in result.items()}


def _drop_copies(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _SAME_VALUE and _same_layout(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _separate_outputs(module: fx.GraphModule) -> None:
    """Replace each output that is also an input, a constant or an earlier output by a copy, in place."""
    graph = module.graph
    output = graph.output_node()
    separate: list[fx.Node] = []
    for node in results(graph):
        if node.op == "call_function" and node not in separate:
            separate.append(node)
            continue
        with graph.inserting_before(output):
            copy = graph.call_function(_aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        separate.append(copy)
    output.args = (tuple(separate),)


def _same_layout(copy: fx.Node, source: fx.Node) -> bool:
    """Return True if ``copy`` has the strides of ``source``, so that it may be dropped before a view."""
    return fake_value(copy).stride() == fake_value(source).stride()


# Digests of functions: that of the traced graph, before anything is rewritten.
#
# All that the compiler makes of a function follows from that graph and from the ports. So one digest means one artifact,
# wherever the code of the function comes from.


class TraceCache:
    """Cache of traced functions, so that a function that was traced for its fingerprint is not traced again to compile."""

    def __init__(self) -> None:
        self._traced: dict[int, TracedFunction] = {}

    def fingerprint(self, function: Function) -> str:
        """Trace ``function``, keep the graph for :meth:`take`, and return the SHA-256 of the graph
        (:func:`fingerprint`).
        """
        with without_collector():
            traced = self._traced[id(function)] = trace(function)
            return fingerprint(traced)

    def take(self, function: Function) -> TracedFunction:
        """Return the traced ``function`` and remove it from the cache. Traces it if necessary."""
        return self._traced.pop(id(function), None) or trace(function)


def fingerprint(traced: TracedFunction) -> str:
    """Return the SHA-256 of a function's name and ports, of every op with its arguments, and of its results.

    Constants count with their values, inputs by their names alone.
    """
    function = traced.function
    ports = [(name, spec) for named in (function.inputs, traced.outputs) for name, spec in named.items()]
    lines = [
        repr((function.name, ports)),
        *(_node_line(traced.module, node) for node in traced.module.graph.nodes),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _node_line(module: fx.GraphModule, node: fx.Node) -> str:
    """Return a text with op and arguments of a node that is equal in all processes."""
    constant = _about(getattr(module, str(node.target))) if node.op == "get_attr" else ""
    return f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {constant}"


def _about(value: Tensor) -> str:
    """Return a text with shape, dtype and digest of a constant; a weight without values has no digest."""
    about = f"{tuple(value.shape)} {value.dtype} {value.device}"
    if value.is_meta:
        return about
    entries = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{about} {hashlib.sha256(entries.numpy().tobytes()).hexdigest()}"
