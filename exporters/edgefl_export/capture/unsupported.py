"""Errors for functions without an ONNX form: the op or the type that has none, its module and its source line."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from edgefl.errors import ExportError
from edgefl_export.capture.instead import instead_of
from edgefl_export.capture.locate import locate, locate_type, refusal
from edgefl_export.capture.trace import LoweredGraph
from edgefl_export.ordering import AFTER

FLOATS = (torch.float32, torch.float64)
"""What a graph computes in. Kernels for narrower floats are missing, and their sums stray too far to be verified.

float16 may leave a graph, as an output that is rounded to it for the way to the server, and wait in one for the backward
pass.
"""

_NODE = re.compile(r"target=torch\.ops\.([\w.]+)")


def check_floats(lowered: LoweredGraph) -> None:
    """Refuse floats narrower than float32, by the input that has them or the op that makes them."""
    node = _first(lowered, _narrow, but=_is_stored_as_float16)
    if node is None:
        return
    remedy = "Only float32 and float64 can be exported, training in narrower floats is not supported:"
    dtype = str(_types(node, _narrow)[0]).removeprefix("torch.")
    if node.op == "placeholder":
        nodes = lowered.module.graph.find_nodes(op="placeholder")
        name = dict(zip(nodes, lowered.inputs, strict=True))[node]
        raise ExportError(
            f"input {name!r} of function {lowered.name!r} is {dtype}. {remedy} declare the port as float32",
            function=lowered.name,
            input=name,
        )
    place = locate_type(lowered.function, _narrow)
    raise refusal(
        lowered.function,
        place.op or str(node.target),
        place,
        f"makes a {dtype} tensor ({place}). {remedy} leave out the conversion or autocast",
    )


def unsupported(lowered: LoweredGraph, error: BaseException) -> ExportError:
    """Return the error for a failure of torch.onnx."""
    texts = _texts(error)
    match = _NODE.search("\n".join(texts))
    if match is None:
        return ExportError(
            f"function {lowered.name!r} has no ONNX form: {texts[-1]}. Express it with other ops, or add a rule in "
            "exporters/edgefl_export/decompositions",
            function=lowered.name,
        )
    place = locate(lowered.function, match[1])
    return refusal(
        lowered.function,
        place.op or match[1],
        place,
        f"has no ONNX form ({place}). "
        + instead_of(
            match[1],
            "Use other ops there, or add a rule that rewrites it to core ops in exporters/edgefl_export/decompositions",
        ),
    )


def _texts(error: BaseException) -> list[str]:
    """Return the messages of ``error`` and of its causes, the first cause last."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    return texts


def _narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in FLOATS


def _first(
    lowered: LoweredGraph,
    types: Callable[[torch.dtype], bool],
    but: Callable[[fx.Node], bool] = lambda _: False,
) -> fx.Node | None:
    nodes = (node for node in lowered.module.graph.nodes if _types(node, types) and not but(node))
    return next(nodes, None)


def _is_stored_as_float16(node: fx.Node) -> bool:
    """Return True if no op computes with a rounded result: it is an output, or is made float32 again."""
    halves = _types(node, _narrow) == [torch.float16]
    return halves and node.op == "call_function" and all(map(_stores, node.users))


def _stores(user: fx.Node) -> bool:
    return user.op == "output" or user.target in (AFTER, torch.ops.aten._to_copy.default)


def _types(node: fx.Node, types: Callable[[torch.dtype], bool]) -> list[torch.dtype]:
    """Return those of ``types`` that results of ``node`` have."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [value.dtype for value in values if isinstance(value, Tensor) and types(value.dtype)]
