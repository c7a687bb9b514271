"""Checks of traced functions. Each refused op is named with its module and source line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.models.spec import CONSTANT
from edgefl.models.user_code import cause_of, user_line_of
from edgefl_export.capture.instead import DECOMPOSITION, FORMLESS, name_of
from edgefl_export.capture.locate import is_compiler, locate, refusal
from edgefl_export.capture.nodes import schema_arguments

# A tensor found in the closure of a function is a constant only while it is clearly no weight.
MAX_CONSTANT_ELEMENTS = 4096
# Masks and tables of positions are no weights, but they make the artifact larger.
MAX_INTEGER_CONSTANT_ELEMENTS = 2**20

_aten = torch.ops.aten
_READS = frozenset({_aten.index.Tensor})
_ADDS = frozenset(
    {_aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index_put.default}
    | {_aten._index_put_impl_.default}
)


def check_ops(function: Function, joint: fx.GraphModule) -> None:
    """Refuse random draws, ops without a form for any engine, and results whose shape depends on values: the trace holds
    those of the example."""
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_told_not_to(node):
            raise _refused(
                function,
                node,
                "draws random numbers; make them of torch.rand, in a model under `if self.training:` alone, or "
                "in an algorithm "
                "an input (role noise)",
            )
        if remedy := FORMLESS.get(name_of(node.target)):
            place = locate(function, str(node.target))
            raise refusal(
                function,
                place.op or str(node.target),
                place,
                f"has no form for any engine ({place}). {remedy}",
            )
        if _has_shape_of_values(node, tags):
            raise _refused(
                function,
                node,
                "gives a result whose shape depends on values; a graph has static shapes. Use torch.where, a product "
                "with the mask, or integer positions",
            )


def _is_told_not_to(node: fx.Node) -> bool:
    """Return True if an op that draws in training only runs in inference."""
    arguments = dict(zip((a.name for a in schema_arguments(node)), node.args, strict=False)) | node.kwargs
    return arguments.get("training", arguments.get("train")) is False


def _has_shape_of_values(node: fx.Node, tags: object) -> bool:
    masked = any(_is_mask(item) for item in _items(node.args[1])) if len(node.args) > 1 else False
    if node.target in _READS:
        return masked  # the tag is on it always
    if node.target in _ADDS:
        return masked and True in node.args[3:4]
    return torch.Tag.dynamic_output_shape in tags  # type: ignore[operator]


def _is_mask(item: object) -> bool:
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _items(argument: object) -> Iterator[object]:
    yield from argument if isinstance(argument, list | tuple) else [argument]


def _refused(function: Function, node: fx.Node, reason: str) -> ExportError:
    place = locate(function, str(node.target))
    return ExportError(
        f"op {node.target} in function {function.name!r} {reason} ({place})",
        function=function.name,
        op=str(node.target),
        place=str(place),
    )


def drop_outside_writes(function: Function, module: fx.GraphModule) -> None:
    """Remove in-place updates of tensors outside the arguments (batch norm's counter) if nothing reads them."""
    writes = {
        node for node in module.graph.nodes if any(_base(item).op == "get_attr" for item in written_by(node))
    }
    for node in writes:
        for constant in (_base(item) for item in written_by(node)):
            same = [n for n in module.graph.find_nodes(op="get_attr") if n.target == constant.target]
            if not all(_is_only_written(item, writes) for item in same):
                raise ExportError(
                    f"function {function.name!r} changes a tensor that is not among its inputs ({node.target}, shape "
                    f"{tuple(getattr(module, str(constant.target)).shape)}) and reads it; make it an input and return the "
                    "new value",
                    function=function.name,
                )
    before = len(module.graph.nodes)
    for node in reversed(list(module.graph.nodes)):
        if node in writes or (is_view(node) and not node.users):
            module.graph.erase_node(node)
    if len(module.graph.nodes) < before:
        module.recompile()


def _is_only_written(node: fx.Node, writes: set[fx.Node]) -> bool:
    inside = (user for user in node.users if user not in writes)
    return all(is_view(user) or _is_copy(user) for user in inside) and all(
        _is_only_written(user, writes) for user in node.users
    )


def _is_copy(node: fx.Node) -> bool:
    """Return True for the copy of a constant, which the objective makes of every counter."""
    return node.target is _aten.clone.default and node.args[0].op == "get_attr"  # type: ignore[union-attr]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    written = [values.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [item for item in pytree.tree_leaves(written) if isinstance(item, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of ``node``, behind views and in-place ops."""
    while True:
        if is_view(node) or _is_copy(node):
            node = node.args[0]  # type: ignore[assignment]
        elif written := written_by(node):
            node = written[0]
        else:
            return node


def is_written_to(node: fx.Node) -> bool:
    """Return True if an op writes into the memory of ``node``."""
    return any(node in written_by(user) or (is_view(user) and is_written_to(user)) for user in node.users)


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def check_constants(function: Function, joint: fx.GraphModule, core: fx.GraphModule) -> None:
    """Check tensors that the function closes over: buffers outside of the state and small tensors may, a weight may not.

    Constants of ``core`` that are not in ``joint`` come from the rules of the compiler.
    """
    constants = [getattr(joint, node.target) for node in joint.graph.find_nodes(op="get_attr")]
    own = {_memory(each) for each in constants}
    buffers = {_memory(each) for each in constants if getattr(each, CONSTANT, False)}
    for node in core.graph.find_nodes(op="get_attr"):
        value = getattr(core, node.target)
        if _memory(value) not in own:
            continue
        # One number for each class or token weighs a loss; a matrix of that many entries is rather a weight.
        floats = (value.is_floating_point() or value.is_complex()) and value.dim() != 1
        limit = MAX_CONSTANT_ELEMENTS if floats else MAX_INTEGER_CONSTANT_ELEMENTS
        large = value.numel() > limit and not function.fixed and _memory(value) not in buffers
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or large:
            raise ExportError(
                f"function {function.name!r} reads a tensor of shape {tuple(value.shape)} ({value.dtype}, at most "
                f"{limit} entries may be a constant) that is not among its inputs; a weight must be an input, or "
                "every device would train a copy of the value at export",
                function=function.name,
                shape=tuple(value.shape),
            )


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def untraceable(function: Function, error: Exception) -> ExportError:
    """Return ``error``, raised while ``function`` was traced, as an ExportError with the source line."""
    text = str(error).strip().split("\n")[0]
    if "_local_scalar_dense" in str(error) or "value out of a tracing tensor" in str(error):
        place = str(locate(function, "aten._local_scalar_dense.default"))
        text = "a Python value is taken out of a tensor (.item(), int(tensor), if tensor:)"
        remedy = (
            "a graph computes with tensors only; use torch.where, or make the value an input (role hyper)"
        )
    elif cause := cause_of(str(error)):
        place = _line(error)
        text, _, remedy = cause.partition("; ")
    elif isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        name, place = _decomposition(function, error)
        text = f"op {name} has no form for any engine"
        remedy = FORMLESS.get(name, DECOMPOSITION)
    else:
        place = _line(error)
        text = f"{type(error).__name__}: {text}"
        remedy = "a function of an algorithm is made of torch ops on its inputs, with static shapes"
    return ExportError(
        f"function {function.name!r} cannot be traced: {text} ({place}); {remedy}",
        function=function.name,
        place=place,
    )


def _decomposition(function: Function, error: Exception) -> tuple[str, str]:
    """Return the op that takes a matrix apart, and its place. The matrix of the trace is singular, and its op is not in
    the graph then."""
    for name in (each for each in FORMLESS if "linalg" in each):
        found = locate(function, f"aten.{name}.default")
        if name_of(found.op) == name:
            return name, str(found)
    return "linalg", _line(error)


def _line(error: Exception) -> str:
    """Return the innermost line of the user's code, or else one outside torch and the compiler."""
    if source := user_line_of(error):
        return f"at {source}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not is_compiler(path):
            return f"at {frame.filename}:{frame.lineno}"
    return "place unknown"
