"""What is known of the values of a graph before it runs: whether they are finite, and on which side of zero they are.

Inputs are taken to be finite, and sums, products and exponentials to stay within what float32 holds: a run that leaves
that has diverged. What is left are the ops that make an infinity of ordinary numbers: roots, logarithms, quotients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, fx

import edgefl.models.layers.cells  # noqa: F401 - defines ops
from edgefl_export.capture.nodes import argument
from edgefl_export.named import named
from edgefl_export.ordering import AFTER

_aten, _ops = torch.ops.aten, torch.ops.edgefl
_RECURRENT = {_ops.gru_cells.default, _ops.lstm_cells.default}
_RECURRENT |= {_ops.gru_cells_backward.default, _ops.lstm_cells_backward.default}


class Finiteness(IntEnum):
    """Sets of numbers, each within the one before it. BELOW: finite or minus infinity, as scores behind a mask."""

    ANY = 0
    BELOW = 1
    FINITE = 2
    NONNEGATIVE = 3
    POSITIVE = 4


VARIANCE = "variance"
"""In ``meta`` of a placeholder that is the running variance of a norm."""
MOST_OF_EPS = 1e-2
"""The most that a normalization adds to a variance."""
MOST_OF_EXPONENTS = 80.0
LARGEST = 1e30
"""A number that what is finite is not compared with: beyond it a comparison finds what is not."""

Look = Callable[[Any], Finiteness]
"""The kind of an argument: of a node or of a number."""
Rule = Callable[[fx.Node, Look], Finiteness]


def kinds_of(module: fx.GraphModule) -> dict[fx.Node, Finiteness]:
    """The kind of each node's entries, of all its tensors if it makes several. An op without a rule makes ANY.

    Placeholders of running variances say so in ``meta[VARIANCE]``. Divisors are guessed: see :func:`guess_of`.
    """
    kinds: dict[fx.Node, Finiteness] = {}

    def look(value: Any) -> Finiteness:
        return kinds[value] if isinstance(value, fx.Node) else _of_number(value)

    for node in module.graph.nodes:
        if node.op == "get_attr":
            kinds[node] = _of_constant(getattr(module, str(node.target)))
        elif node.op != "output":
            kind = _of_type(node)
            kinds[node] = _of_op(node, look) if kind is None else kind
    return kinds


def guess_of(node: fx.Node, kinds: Mapping[fx.Node, Finiteness]) -> fx.Node | None:
    """What ``node`` divides by, if its kind holds only where that is not zero.

    A single number that is computed is mostly that of a mean over a batch of which some rows do not count.
    """
    if node.target is not _aten.div.Tensor or kinds[node] < Finiteness.FINITE:
        return None
    divisor = node.args[1]
    guessed = isinstance(divisor, fx.Node) and kinds[divisor] is not Finiteness.POSITIVE
    return divisor if guessed else None  # type: ignore[return-value]


def _of_type(node: fx.Node) -> Finiteness | None:
    """What dtype tells: None, nothing."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    if value.dtype is torch.bool:
        return Finiteness.NONNEGATIVE
    if not value.is_floating_point():
        return Finiteness.FINITE
    return None


def _of_op(node: fx.Node, look: Look) -> Finiteness:
    if node.op == "placeholder":
        return Finiteness.FINITE
    rule = _RULES.get(node.target)
    return rule(node, look) if rule else Finiteness.ANY


def _of_number(value: Any) -> Finiteness:
    if not isinstance(value, (int, float)) or math.isnan(value) or value == math.inf:
        return Finiteness.ANY
    if value == -math.inf:
        return Finiteness.BELOW
    return Finiteness.POSITIVE if value > 0 else Finiteness.NONNEGATIVE if value == 0 else Finiteness.FINITE


def _of_constant(data: Tensor) -> Finiteness:
    if not data.numel():
        return Finiteness.FINITE
    if data.is_complex():
        return Finiteness.ANY
    return min(_of_number(data.amin().item()), _of_number(data.amax().item()))


def _passed(node: fx.Node, look: Look) -> Finiteness:
    """Entries, sums and means of what is read are of its kind."""
    return min(map(look, node.all_input_nodes), default=Finiteness.ANY)


def _at(*places: int) -> Rule:
    """As :func:`_passed`, of these arguments alone, numbers among them."""
    return lambda node, look: min(look(node.args[place]) for place in places if place < len(node.args))


def _computed(least: Finiteness, made: Finiteness) -> Rule:
    """An op that makes ``made`` of ``least`` and of what lies within it."""
    return lambda node, look: made if _passed(node, look) >= least else Finiteness.ANY


def _at_least(floor: Finiteness, needed: Finiteness) -> Rule:
    """An op that keeps the kind of its first argument and lifts it to ``floor``, if it is within ``needed``."""

    def rule(node: fx.Node, look: Look) -> Finiteness:
        kind = look(node.args[0])
        return max(kind, floor) if kind >= needed else Finiteness.ANY

    return rule


def _added(node: fx.Node, look: Look) -> Finiteness:
    least, most = sorted(map(look, node.args[:2]))
    if node.kwargs:
        return min(least, Finiteness.FINITE)
    return most if least >= Finiteness.NONNEGATIVE or _is_variance(*node.args[:2]) else least


def _is_variance(first: Any, second: Any) -> bool:
    """Whether a sum is one of a model's variance, which is not negative, and of what keeps that away from zero."""
    variance = isinstance(first, fx.Node) and first.meta.get(VARIANCE, False)
    return variance and isinstance(second, (int, float)) and 0 < second <= MOST_OF_EPS


def _subtracted(node: fx.Node, look: Look) -> Finiteness:
    first, second = map(look, node.args[:2])
    return min(first, Finiteness.FINITE) if second >= Finiteness.FINITE else Finiteness.ANY


def _multiplied(node: fx.Node, look: Look) -> Finiteness:
    first, second = map(look, node.args[:2])
    if min(first, second) < Finiteness.FINITE:
        return Finiteness.ANY
    return max(first, Finiteness.NONNEGATIVE) if node.args[0] is node.args[1] else min(first, second)


def _divided(node: fx.Node, look: Look) -> Finiteness:
    first, second = map(look, node.args[:2])
    if first < Finiteness.FINITE:
        return Finiteness.ANY
    if second is Finiteness.POSITIVE:
        return first
    divisor = node.args[1]
    if isinstance(divisor, (int, float)):
        return Finiteness.FINITE if divisor else Finiteness.ANY
    if second < Finiteness.FINITE or divisor.op != "call_function" or divisor.meta["val"].dim():  # type: ignore[union-attr]
        return Finiteness.ANY
    return min(first, second)


def _powered(node: fx.Node, look: Look) -> Finiteness:
    kind, exponent = look(node.args[0]), node.args[1]
    if kind is Finiteness.POSITIVE:
        return kind
    if kind < Finiteness.FINITE or not isinstance(exponent, (int, float)) or exponent < 0:
        return Finiteness.ANY
    if exponent % 2 == 0:
        return Finiteness.NONNEGATIVE
    return kind if kind is Finiteness.NONNEGATIVE or exponent % 1 == 0 else Finiteness.ANY


def _clamped(low: str) -> Rule:
    def rule(node: fx.Node, look: Look) -> Finiteness:
        kind, bound = look(node.args[0]), argument(node, low)
        if kind < Finiteness.BELOW or bound is None:
            return min(kind, Finiteness.FINITE)
        return max(look(bound), Finiteness.FINITE)

    return rule


def _largest(node: fx.Node, look: Look) -> Finiteness:
    """A window of nothing but minus infinity is taken not to be."""
    kinds = [look(value) for value in node.all_input_nodes]
    return max(*kinds, Finiteness.FINITE) if min(kinds) >= Finiteness.BELOW else Finiteness.ANY


def _selected(node: fx.Node, look: Look) -> Finiteness:
    """Of both, or of the first alone where the condition is that something finite is."""
    condition, first, second = node.args
    assert isinstance(condition, fx.Node)
    if condition.target in (_aten.le.Scalar, _aten.lt.Scalar):
        value, bound = condition.args
        if look(value) >= Finiteness.FINITE and isinstance(bound, (int, float)) and bound >= LARGEST:
            return look(first)
    return min(look(first), look(second))


def _exponential(node: fx.Node, look: Look) -> Finiteness:
    """Finite of what is not far above zero: 89 is too much for float32. It may be 0 all the same."""
    read = node.args[0]
    bounded = isinstance(read, fx.Node) and look(read) >= Finiteness.BELOW and _is_bounded(read, look)
    return Finiteness.NONNEGATIVE if bounded else Finiteness.ANY


def _is_bounded(node: fx.Node, look: Look) -> bool:
    """Logarithms of a softmax, x - max x, -y and -c y of a y that is not negative, and what is clamped."""
    second = node.args[1] if len(node.args) > 1 else None
    if node.target is _aten._log_softmax.default:
        return True
    if node.target is _aten.neg.default:
        return look(node.args[0]) >= Finiteness.NONNEGATIVE
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        return (
            look(node.args[0]) >= Finiteness.NONNEGATIVE and isinstance(second, (int, float)) and second <= 0
        )
    if node.target is _aten.clamp.default:
        most = argument(node, "max")
        return isinstance(most, (int, float)) and most <= MOST_OF_EXPONENTS
    if node.target is not _aten.sub.Tensor or node.kwargs or not isinstance(second, fx.Node):
        return False
    return second.target is _aten.amax.default and second.args[0] is node.args[0]


def _logarithm(node: fx.Node, look: Look) -> Finiteness:
    operand = look(node.args[0])
    if operand is Finiteness.POSITIVE:
        return Finiteness.FINITE
    return Finiteness.BELOW if operand is Finiteness.NONNEGATIVE else Finiteness.ANY


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        named(
            "_to_copy _unsafe_view alias amin avg_pool2d cat clone expand flip mean mean.dim minimum "
            "permute repeat reshape select.int slice.Tensor split.Tensor split_with_sizes sort squeeze "
            "squeeze.dim squeeze.dims sum sum.dim_IntList t topk transpose.int unsqueeze view"
        )
        | {operator.getitem, AFTER},
        _passed,
    ),
    **dict.fromkeys(
        (_aten.embedding.default, _aten.gather.default, _aten.index.Tensor, _aten.index_select.default),
        _at(0),
    ),
    **dict.fromkeys((_aten.full.default, _aten.full_like.default), _at(1)),
    _aten.scalar_tensor.default: _at(0),
    _aten.constant_pad_nd.default: _at(0, 2),
    _aten.where.self: _selected,
    **dict.fromkeys(
        (_aten.scatter.src, _aten.scatter_add.default), _computed(Finiteness.FINITE, Finiteness.FINITE)
    ),
    **dict.fromkeys(
        named(
            "addmm bmm ceil convolution cos cumsum elu floor gelu leaky_relu mm "
            "_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training native_group_norm "
            "native_layer_norm neg round rsub.Scalar sin upsample_bilinear2d.vec upsample_nearest2d.vec"
        )
        | _RECURRENT,
        _computed(Finiteness.FINITE, Finiteness.FINITE),
    ),
    # A row of nothing but minus infinity makes NaN.
    _aten._log_softmax.default: _computed(Finiteness.FINITE, Finiteness.FINITE),
    _aten._softmax.default: _computed(Finiteness.FINITE, Finiteness.NONNEGATIVE),
    **dict.fromkeys(
        (_aten.erf.default, _aten.sign.default, _aten.tanh.default),
        _computed(Finiteness.BELOW, Finiteness.FINITE),
    ),
    _aten.sigmoid.default: _computed(Finiteness.BELOW, Finiteness.NONNEGATIVE),
    _aten.exp.default: _exponential,
    _aten.log.default: _logarithm,
    _aten.log1p.default: _at_least(Finiteness.NONNEGATIVE, Finiteness.NONNEGATIVE),
    _aten.sqrt.default: _at_least(Finiteness.NONNEGATIVE, Finiteness.NONNEGATIVE),
    **dict.fromkeys(
        (_aten.reciprocal.default, _aten.rsqrt.default), _computed(Finiteness.POSITIVE, Finiteness.POSITIVE)
    ),
    _aten.abs.default: _at_least(Finiteness.NONNEGATIVE, Finiteness.FINITE),
    _aten.relu.default: _at_least(Finiteness.NONNEGATIVE, Finiteness.BELOW),
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar), _added),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar), _subtracted),
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar), _multiplied),
    **dict.fromkeys((_aten.div.Tensor, _aten.div.Scalar), _divided),
    _aten.pow.Tensor_Scalar: _powered,
    _aten.clamp.default: _clamped("min"),
    _aten.clamp_min.default: _clamped("min"),
    _aten.hardtanh.default: _clamped("min_val"),
    **dict.fromkeys(
        (_aten.amax.default, _aten.maximum.default, _aten.max_pool2d_with_indices.default), _largest
    ),
}
