"""Complex tensors as pairs of real numbers on a last axis of length 2, because no engine has complex numbers.

Runs between the two passes of :mod:`edgefl_export.capture.trace`, on forward, backward and update at once. A pair has the
memory layout of the complex tensor, so that views and writes in place keep their meaning; ``view_as_real`` and
``view_as_complex`` cost nothing. Ops that only move entries run on the pair unchanged (:data:`_MOVING`). All other ops
have a rule in :mod:`edgefl_export.decompositions.complex_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl_export.capture.locate import locate_call, refusal
from edgefl_export.capture.nodes import fake_value, results
from edgefl_export.capture.refusals import instead_of
from edgefl_export.decompositions.complex_numbers import (
    RULES,
    ComplexPair,
    Operand,
    as_pair,
    halves,
    join_parts,
)
from edgefl_export.operators import aten_ops

_aten = torch.ops.aten
_WRITTEN_OUT = (
    "Keep real and imaginary parts as float tensors and write products out: "
    "(a + bi)(c + di) = (a c - b d) + (a d + b c)i"
)


class NoComplexFormError(Exception):
    """Error: an op on complex numbers has no rule. It is raised while tracing; :meth:`refusal` gives the error for users.

    The source line is searched for after the trace, which would otherwise record the search.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node.target))
        self._op = str(node.target)

    def refusal(self, function: Function) -> ExportError:
        """Run ``function`` again to find the op, and return the error with its source line and a remedy."""
        place = locate_call(function, self._op, lambda value: value.is_complex())
        remedy = instead_of(self._op, _WRITTEN_OUT)
        return refusal(function, self._op, place, "has no form for complex numbers", f". {remedy}")


def without_complex(
    function: Function, names: Sequence[str], joint: fx.GraphModule
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that computes ``joint`` without complex tensors, or ``joint`` itself if it has none.

    Args:
        function: the traced function, for errors.
        names: names of the inputs of ``joint``, in order.
        joint: graph of the first pass.

    Raises:
        ExportError: if an input or an output is complex.
        NoComplexFormError: raised by the returned function for an op on complex numbers without a rule.
    """
    graph = joint.graph
    if not any(map(_is_complex, graph.nodes)):
        return joint
    placeholders = graph.find_nodes(op="placeholder")
    for name, node in (*zip(names, placeholders, strict=True), *(("", node) for node in results(graph))):
        if _is_complex(node):
            raise ExportError(
                f"expected float tensors as inputs and outputs of function {function.name!r}, found "
                f"{repr(name) if name else 'an output'} of {_dtype(node)}; store torch.view_as_real(w) instead of a "
                "complex weight w, and call torch.view_as_complex on it in forward",
                function=function.name,
                port=name,
            )
    return _PairInterpreter(joint).run


class _PairInterpreter(fx.Interpreter):
    """Interpreter of a graph that uses a :class:`ComplexPair` for each complex tensor."""

    def __init__(self, joint: fx.GraphModule) -> None:
        super().__init__(joint)
        self.extra_traceback = False  # it would rewrite the text of errors
        constants = {
            node.target: getattr(joint, cast(str, node.target))
            for node in joint.graph.find_nodes(op="get_attr")
        }
        # Views made here are constants. Made while the graph runs, they would be nodes.
        self._constants = {
            target: ComplexPair(torch.view_as_real(value.resolve_conj()))
            for target, value in constants.items()
            if value.is_complex()
        }

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._constants.get(target) or super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not _is_complex(n) and not any(
            isinstance(value, ComplexPair | complex) for value in _leaves(args, kwargs)
        ):
            # The bit of a negated view is lost where its copy is recorded.
            return torch.neg(args[0]) if n.target is _aten._neg_view.default else n.target(*args, **kwargs)
        made = _run(n, args, kwargs)
        if made is NotImplemented:
            raise NoComplexFormError(n)
        return made


def _run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of the op of ``node`` on pairs (complex tensors as real ones), or NotImplemented if the op
    has no rule.
    """
    op = cast(OpOverload, node.target)
    if op._schema.is_mutable:
        return _write(node, args, kwargs)
    rule = RULES.get(op)
    if op is _aten.as_strided.default:
        made = _as_strided(node, *args)
    elif rule is not None:
        made = rule(*args, **kwargs)
    elif op in _MOVING:
        made = _run_moving(op, args, kwargs)
    else:
        return NotImplemented
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return _cast_like(made, value)
    return [_cast_like(each, like) for each, like in zip(made, value, strict=True)]


def _as_strided(
    node: fx.Node, x: ComplexPair, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> Any:
    """Return ``as_strided`` of a pair, or NotImplemented if its strides differ from those of the complex tensor."""
    like = fake_value(node.args[0])
    strides = (*(2 * each for each in like.stride()), 1)
    if x.parts.stride() != strides or x.parts.storage_offset() != 2 * like.storage_offset():
        return NotImplemented
    return ComplexPair(x.parts.as_strided([*size, 2], [*(2 * each for each in stride), 1], 2 * offset))


def _cast_like(made: Any, like: Tensor) -> Any:
    """Return ``made`` converted to the dtype of ``like``, torch's result; NotImplemented if the shapes differ."""
    if made is NotImplemented or isinstance(made, complex):
        return made
    value = made.parts if isinstance(made, ComplexPair) else made
    shape = (*like.shape, 2) if like.is_complex() else tuple(like.shape)
    if isinstance(made, ComplexPair) != like.is_complex() or tuple(value.shape) != shape:
        return NotImplemented
    dtype = like.dtype.to_real()
    value = value if value.dtype == dtype else value.to(dtype)
    return ComplexPair(value) if like.is_complex() else value


def _write(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the in-place op of ``node`` on pairs (complex tensors as real ones): compute its form without writes and
    copy the result into the first argument.

    Return the first argument, or NotImplemented if there is no rule for the op.
    """
    op, target = cast(OpOverload, node.target), args[0]
    if op is _aten.copy_.default:
        made: Any = args[1]
        made = (
            made
            if isinstance(target, ComplexPair) == isinstance(made, ComplexPair)
            else _convert(made, target)
        )
    else:
        packet = getattr(_aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
        plain = getattr(packet, op._overloadname, None)
        rule = RULES.get(plain) or (plain in _MOVING and (lambda *a, **k: _run_moving(plain, a, k)))
        made = rule(*args, **kwargs) if rule else NotImplemented
    if made is NotImplemented or isinstance(made, ComplexPair) != isinstance(target, ComplexPair):
        return NotImplemented
    if isinstance(target, ComplexPair):
        target.parts.copy_(made.parts)
    else:
        target.copy_(made)
    return target


def _convert(value: Operand, like: Operand) -> Operand:
    real, imaginary = halves(value)
    return join_parts(real, imaginary) if isinstance(like, ComplexPair) else cast(Tensor, real)


# Ops that move entries: the pair's axis is one more at the end.

_DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1"})
_SIZES = {"size": 2, "shape": 2, "input_sizes": 2, "self_sizes": 2, "repeats": 1}

_MOVING = aten_ops(
    "alias cat clone constant_pad_nd cumsum detach empty.memory_format empty_like expand flip "
    "index.Tensor index_add index_put index_select lift_fresh lift_fresh_copy mean.dim neg new_empty "
    "new_zeros permute repeat reshape resolve_conj resolve_neg select.int select_backward slice.Tensor "
    "slice_backward split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims stack sum.dim_IntList "
    "transpose.int unbind.int unsqueeze view _unsafe_view zero zeros zeros_like"
)
_RESHAPING = frozenset({_aten.view.default, _aten._unsafe_view.default})


def _run_moving(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``op``, which only moves entries, on the parts of pairs (complex tensors as real ones) and return its result.
    Sizes and dimensions are adapted to the last axis, which holds the two parts.

    Return NotImplemented if the first argument is a complex number and the op has further arguments that may change its
    shape.
    """
    leaves = _leaves(args, kwargs)
    if isinstance(args[0], complex):  # of a tensor that is a number
        return args[0] if op._schema.arguments[1:] == [] or op is _aten.clone.default else NotImplemented
    # A result counts as contiguous here, so that a view may have to be a copy.
    target = _aten.reshape.default if op in _RESHAPING else op
    rank = next((value.parts.dim() - 1 for value in leaves if isinstance(value, ComplexPair)), 0)
    rank += op in (_aten.unsqueeze.default, _aten.stack.default, _aten.select_backward.default)
    named = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    for name, value in named.items():
        if name in _DIMENSIONS:
            many = isinstance(value, list | tuple)
            named[name] = (
                [each % rank for each in value] if many else value % rank if value is not None else None
            )
            if not named[name] and name == "dim" and (many or value is None):
                named[name] = list(range(rank))  # a sum over all axes
            if op is _aten.permute.default:
                named[name] = [*named[name], rank]
        elif name in _SIZES:
            named[name] = [*value, _SIZES[name]]
        elif name == "pad":
            named[name] = [0, 0, *value]
        elif name == "dtype" and value is not None:
            named[name] = value.to_real()
        elif name in ("tensors", "values"):
            named[name] = pytree.tree_map_only(Tensor, as_pair, value)
    arguments = pytree.tree_map_only(ComplexPair, lambda pair: pair.parts, named)
    order = [each for each in op._schema.arguments if each.name in arguments]
    made = target(
        *(arguments[each.name] for each in order if not each.kwarg_only),
        **{each.name: arguments[each.name] for each in order if each.kwarg_only},
    )
    return [ComplexPair(each) for each in made] if isinstance(made, list | tuple) else ComplexPair(made)


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return pytree.tree_leaves((args, kwargs))


def _dtype(node: fx.Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _is_complex(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)
