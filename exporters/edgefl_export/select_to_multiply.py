"""Pass that replaces selections between a value and zero, as in dropout and ReLU's gradient, by products with a mask.

Engines take longer to select than to multiply: onnxruntime five times as long, and for tensors of activations
ExecuTorch's own kernel longer than for a product of matrices. A product differs from a selection if the value that is not
selected is infinite or NaN, because 0 * inf is NaN. So only values that :func:`value_ranges` knows to be finite are
rewritten.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, fx

import edgefl.models.layers.cells  # noqa: F401 - defines ops
from edgefl_export.capture.nodes import PORT, argument, broadcast_shape, call, fake_value, node_argument
from edgefl_export.operators import AFTER, aten_ops

_aten = torch.ops.aten
_ZEROS = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.scalar_tensor.default: 0}
_JOINED = aten_ops("bitwise_and.Tensor bitwise_or.Tensor logical_and logical_not logical_or")
OPPOSITES = {
    getattr(_aten, one): getattr(_aten, other)
    for one, other in (("gt", "le"), ("le", "gt"), ("lt", "ge"), ("ge", "lt"))
}
"""Comparisons that have a mask, each with its complement. That holds for numbers only: both are false for NaN."""


class SelectToMultiply(ABC):
    """Base class of the pass: where(x >= c, y, 0) -> y * mask. Subclasses compute the mask for one engine."""

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        _Rewriter(module, self).run()

    @abstractmethod
    def mask(self, condition: fx.Node, negated: bool, writer: NodeWriter) -> fx.Node | None:
        """Insert the nodes of a mask that is 1.0 where ``condition`` holds and 0.0 elsewhere.

        Args:
            condition: boolean node: a comparison, or several joined by logical ops.
            negated: the mask is 1.0 where the condition does not hold.
            writer: function that inserts new nodes before the selection.

        Returns:
            The mask as float32, or None if the engine cannot compute it.
        """


NodeWriter = Callable[..., fx.Node]
"""Inserts the call of a function with its arguments, and returns the node."""


class _Rewriter:
    """Single run of the pass :class:`SelectToMultiply` over a graph."""

    def __init__(self, module: fx.GraphModule, selections: SelectToMultiply) -> None:
        self._graph, self._module, self._selections = module.graph, module, selections
        self._write = partial(call, module.graph)
        self._ranges = value_ranges(module)
        self._inputs = _inputs_of(module.graph)
        self._guesses = _spread(module.graph.nodes, self._guess, _is_whole)
        self._masks: dict[tuple[fx.Node, bool], fx.Node | None] = {}
        self._made: dict[tuple[fx.Node, fx.Node, bool], fx.Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is _aten.where.self and _is_float(node) and self._is_mask(node.args[0]):
                self._rewrite(node, *(node_argument(node, place) for place in range(3)))
        self._graph.eliminate_dead_code()

    def _rewrite(self, node: fx.Node, condition: fx.Node, chosen: fx.Node, other: fx.Node) -> None:
        if self._is_zero(other):
            branch, negated = chosen, False
        elif self._is_zero(chosen):
            branch, negated = other, True
        else:
            return
        if not self._is_finite(branch) or self._may_guard(condition, branch):
            return
        if broadcast_shape(fake_value(condition), fake_value(branch)) != fake_value(node).shape:
            return  # the zeros are what makes it larger
        with self._graph.inserting_before(node):
            new = self._product(branch, condition, negated)
        if new is None:
            return
        self._made[condition, branch, negated] = new
        self._ranges[new], self._guesses[new] = self._ranges[node], self._guesses[node]
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _product(self, kept: fx.Node, condition: fx.Node, negated: bool) -> fx.Node | None:
        """Insert the product of ``kept`` and the mask of ``condition``; return None if the engine has no mask for it.

        If the product with the opposite mask exists, the result is ``kept`` minus that product, without a second mask.
        """
        rest = self._made.get((condition, kept, not negated))
        if rest is not None and rest.meta["val"].shape == kept.meta["val"].shape:
            return self._write(_aten.sub.Tensor, kept, rest)
        key = condition, negated
        if key not in self._masks:
            self._masks[key] = self._selections.mask(condition, negated, self._write)
        mask = self._masks[key]
        return None if mask is None else self._write(_aten.mul.Tensor, kept, mask)

    def _is_mask(self, condition: Any) -> bool:
        """Return True if ``condition`` consists of comparisons of finite values, alone or joined by logical ops.

        A condition with one entry is excluded: it costs no time, and mostly guards a quotient by that number.
        """
        if not isinstance(condition, fx.Node) or condition.meta["val"].numel() == 1:
            return False
        if condition.target in _JOINED:
            return all(map(self._is_mask, condition.args))
        compares = getattr(condition.target, "overloadpacket", None) in OPPOSITES
        return compares and all(map(self._is_known, condition.args))

    def _is_known(self, value: object) -> bool:
        """Return True if ``value`` is finite and below :data:`LARGEST`, so that a comparison is no test for infinity."""
        if isinstance(value, fx.Node):
            return self._is_finite(value)
        return isinstance(value, (int, float)) and abs(value) < LARGEST

    def _guess(self, node: fx.Node) -> int:
        divisor = guessed_divisor(node, self._ranges) if node.op == "call_function" else None
        return 0 if divisor is None else self._inputs[divisor]

    def _may_guard(self, condition: fx.Node, kept: fx.Node) -> bool:
        """Return True if ``condition`` may protect ``kept`` from a division by zero.

        It may if it depends on an input of a divisor that was assumed not to be zero, as a mask and its sum do.
        """
        return bool(self._inputs[condition] & self._guesses[kept])

    def _is_zero(self, value: fx.Node) -> bool:
        if value.op == "get_attr":
            return not getattr(self._module, str(value.target)).any()
        return value.target in _ZEROS and bool(value.args[_ZEROS[value.target]] == 0)

    def _is_finite(self, value: fx.Node) -> bool:
        return self._ranges[value] >= ValueRange.FINITE and _is_float(value)


def _is_whole(node: fx.Node) -> bool:
    """Return True if the value is an integer or a boolean, so that it is neither infinite nor NaN."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.float32


def _inputs_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node a bit mask of the placeholders that it is computed from."""
    bits = {node: 1 << at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    return _spread(graph.nodes, lambda node: bits.get(node, 0))


def _spread(
    nodes: Iterable[fx.Node],
    own: Callable[[fx.Node], int],
    ends: Callable[[fx.Node], bool] = lambda node: False,
) -> dict[fx.Node, int]:
    """Return for each node the union of its bits ``own(node)`` and of those of all nodes that it is computed from.

    The union is 0 for a node with ``ends(node)``, so no bits pass through it.
    """
    origins: dict[fx.Node, int] = {}
    for node in nodes:
        bits = reduce(or_, (origins[read] for read in node.all_input_nodes), own(node))
        origins[node] = 0 if ends(node) else bits
    return origins


# Ranges of the values of a graph before it runs: whether they are finite, and their sign.
#
# Inputs are taken to be finite, and sums, products and exponentials to stay within float32: a run that leaves it has
# diverged. The rules are about the ops that return an infinity for ordinary numbers: roots, logarithms, quotients.

_aten, _ops = torch.ops.aten, torch.ops.edgefl
_RECURRENT = {_ops.gru_cells.default, _ops.lstm_cells.default}
_RECURRENT |= {_ops.gru_cells_backward.default, _ops.lstm_cells_backward.default}


class ValueRange(IntEnum):
    """Range of numbers that contains all entries of a value. Each member contains the next one.

    BELOW contains the finite numbers and minus infinity, which masked attention scores have.
    """

    ANY = 0
    BELOW = 1
    FINITE = 2
    NONNEGATIVE = 3
    POSITIVE = 4


MOST_OF_EPS = 1e-2
"""Largest constant that a normalization adds to a variance."""
MOST_OF_EXPONENTS = 80.0
LARGEST = 1e30
"""Finite values lie below this number: a comparison with a larger one tests for infinity."""

Look = Callable[[Any], ValueRange]
"""Returns the range of an argument, a node or a number."""
Rule = Callable[[fx.Node, Look], ValueRange]


def value_ranges(module: fx.GraphModule) -> dict[fx.Node, ValueRange]:
    """Return the range of the entries of each node, over all tensors of a node with several results.

    Inputs are assumed to be finite. An op without a rule gives ANY. A placeholder is a running variance if the name of its
    port, ``meta[PORT]``, ends with ``running_var``. Divisors that are computed single numbers are assumed not to be 0
    (:func:`guessed_divisor`).
    """
    ranges: dict[fx.Node, ValueRange] = {}

    def look(value: Any) -> ValueRange:
        return ranges[value] if isinstance(value, fx.Node) else _range_of_number(value)

    for node in module.graph.nodes:
        if node.op == "get_attr":
            ranges[node] = _range_of_constant(getattr(module, str(node.target)))
        elif node.op != "output":
            known = _range_of_type(node)
            ranges[node] = _range_of_op(node, look) if known is None else known
    return ranges


def guessed_divisor(node: fx.Node, ranges: Mapping[fx.Node, ValueRange]) -> fx.Node | None:
    """Return the divisor of the division ``node`` if the node's range assumes that the divisor is not zero.

    Return None if no such assumption was made, or for another op. The assumption concerns computed single numbers,
    which are mostly the row counts of a mean over a batch with masked rows.
    """
    if node.target is not _aten.div.Tensor or ranges[node] < ValueRange.FINITE:
        return None
    divisor = node.args[1]
    guessed = isinstance(divisor, fx.Node) and ranges[divisor] is not ValueRange.POSITIVE
    return divisor if guessed else None  # type: ignore[return-value]


def _range_of_type(node: fx.Node) -> ValueRange | None:
    """Return the range that follows from the dtype of a node, or None for floats."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    if value.dtype is torch.bool:
        return ValueRange.NONNEGATIVE
    if not value.is_floating_point():
        return ValueRange.FINITE
    return None


def _range_of_op(node: fx.Node, look: Look) -> ValueRange:
    if node.op == "placeholder":
        return ValueRange.FINITE
    rule = _RULES.get(node.target)
    return rule(node, look) if rule else ValueRange.ANY


def _range_of_number(value: Any) -> ValueRange:
    if not isinstance(value, (int, float)) or math.isnan(value) or value == math.inf:
        return ValueRange.ANY
    if value == -math.inf:
        return ValueRange.BELOW
    return ValueRange.POSITIVE if value > 0 else ValueRange.NONNEGATIVE if value == 0 else ValueRange.FINITE


def _range_of_constant(data: Tensor) -> ValueRange:
    if not data.numel():
        return ValueRange.FINITE
    if data.is_complex():
        return ValueRange.ANY
    return min(_range_of_number(data.amin().item()), _range_of_number(data.amax().item()))


def _passed(node: fx.Node, look: Look) -> ValueRange:
    """Return the range of the result of an op that copies, adds or averages: the widest range among the arguments of
    ``node``, where ``look`` returns the range of each.
    """
    return min(map(look, node.all_input_nodes), default=ValueRange.ANY)


def _widest_at(*places: int) -> Rule:
    """Return a rule that gives the widest range among the positional arguments at ``places``, numbers included."""
    return lambda node, look: min(look(node.args[place]) for place in places if place < len(node.args))


def _computed(least: ValueRange, made: ValueRange) -> Rule:
    """Return a rule that gives ``made`` if all arguments lie within ``least``, else ANY."""
    return lambda node, look: made if _passed(node, look) >= least else ValueRange.ANY


def _at_least(floor: ValueRange, needed: ValueRange) -> Rule:
    """Return a rule for an op whose result lies in the range of its first argument and in ``floor``.

    The rule returns the narrower of both ranges, or ANY if the argument is not within ``needed``.
    """

    def rule(node: fx.Node, look: Look) -> ValueRange:
        known = look(node.args[0])
        return max(known, floor) if known >= needed else ValueRange.ANY

    return rule


def _added(node: fx.Node, look: Look) -> ValueRange:
    least, most = sorted(map(look, node.args[:2]))
    if node.kwargs:
        return min(least, ValueRange.FINITE)
    return most if least >= ValueRange.NONNEGATIVE or _is_variance(*node.args[:2]) else least


def _is_variance(first: Any, second: Any) -> bool:
    """Return True for a running variance, which is not negative, plus the epsilon of a norm."""
    variance = isinstance(first, fx.Node) and first.meta.get(PORT, "").endswith(".running_var")
    return variance and isinstance(second, (int, float)) and 0 < second <= MOST_OF_EPS


def _subtracted(node: fx.Node, look: Look) -> ValueRange:
    first, second = map(look, node.args[:2])
    return min(first, ValueRange.FINITE) if second >= ValueRange.FINITE else ValueRange.ANY


def _multiplied(node: fx.Node, look: Look) -> ValueRange:
    first, second = map(look, node.args[:2])
    if min(first, second) < ValueRange.FINITE:
        return ValueRange.ANY
    return max(first, ValueRange.NONNEGATIVE) if node.args[0] is node.args[1] else min(first, second)


def _divided(node: fx.Node, look: Look) -> ValueRange:
    first, second = map(look, node.args[:2])
    if first < ValueRange.FINITE:
        return ValueRange.ANY
    if second is ValueRange.POSITIVE:
        return first
    divisor = node.args[1]
    if isinstance(divisor, (int, float)):
        return ValueRange.FINITE if divisor else ValueRange.ANY
    if second < ValueRange.FINITE or divisor.op != "call_function" or divisor.meta["val"].dim():  # type: ignore[union-attr]
        return ValueRange.ANY
    return min(first, second)


def _powered(node: fx.Node, look: Look) -> ValueRange:
    known, exponent = look(node.args[0]), node.args[1]
    if known is ValueRange.POSITIVE:
        return known
    if known < ValueRange.FINITE or not isinstance(exponent, (int, float)) or exponent < 0:
        return ValueRange.ANY
    if exponent % 2 == 0:
        return ValueRange.NONNEGATIVE
    return known if known is ValueRange.NONNEGATIVE or exponent % 1 == 0 else ValueRange.ANY


def _clamped(low: str) -> Rule:
    def rule(node: fx.Node, look: Look) -> ValueRange:
        known, bound = look(node.args[0]), argument(node, low)
        if known < ValueRange.BELOW or bound is None:
            return min(known, ValueRange.FINITE)
        return max(look(bound), ValueRange.FINITE)

    return rule


def _largest(node: fx.Node, look: Look) -> ValueRange:
    """Return the range of a maximum; ``look`` returns the range of an argument.

    A window of minus infinities alone is assumed not to occur.
    """
    ranges = [look(value) for value in node.all_input_nodes]
    return max(*ranges, ValueRange.FINITE) if min(ranges) >= ValueRange.BELOW else ValueRange.ANY


def _selected(node: fx.Node, look: Look) -> ValueRange:
    """Return the range of both branches, or of the first alone if the condition holds for every finite value.

    ``look`` returns the range of an argument.
    """
    condition, first, second = node.args
    assert isinstance(condition, fx.Node)
    if condition.target in (_aten.le.Scalar, _aten.lt.Scalar):
        value, bound = condition.args
        if look(value) >= ValueRange.FINITE and isinstance(bound, (int, float)) and bound >= LARGEST:
            return look(first)
    return min(look(first), look(second))


def _exponential(node: fx.Node, look: Look) -> ValueRange:
    """Return NONNEGATIVE if the exponent has an upper bound, else ANY, because exp(89) overflows float32.

    ``look`` returns the range of an argument.
    """
    read = node.args[0]
    bounded = isinstance(read, fx.Node) and look(read) >= ValueRange.BELOW and _is_bounded(read, look)
    return ValueRange.NONNEGATIVE if bounded else ValueRange.ANY


def _is_bounded(node: fx.Node, look: Look) -> bool:
    """Return True if ``node`` has a known upper bound; ``look`` returns the range of an argument.

    These are log-softmax, x - max x, clamped values, and -y and -c y for a y that is not negative.
    """
    second = node.args[1] if len(node.args) > 1 else None
    if node.target is _aten._log_softmax.default:
        return True
    if node.target is _aten.neg.default:
        return look(node.args[0]) >= ValueRange.NONNEGATIVE
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        return (
            look(node.args[0]) >= ValueRange.NONNEGATIVE and isinstance(second, (int, float)) and second <= 0
        )
    if node.target is _aten.clamp.default:
        most = argument(node, "max")
        return isinstance(most, (int, float)) and most <= MOST_OF_EXPONENTS
    if node.target is not _aten.sub.Tensor or node.kwargs or not isinstance(second, fx.Node):
        return False
    return second.target is _aten.amax.default and second.args[0] is node.args[0]


def _logarithm(node: fx.Node, look: Look) -> ValueRange:
    operand = look(node.args[0])
    if operand is ValueRange.POSITIVE:
        return ValueRange.FINITE
    return ValueRange.BELOW if operand is ValueRange.NONNEGATIVE else ValueRange.ANY


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        aten_ops(
            "_to_copy _unsafe_view alias amin avg_pool2d cat clone expand flip mean mean.dim minimum "
            "permute repeat reshape select.int slice.Tensor split.Tensor split_with_sizes sort squeeze "
            "squeeze.dim squeeze.dims sum sum.dim_IntList t topk transpose.int unsqueeze view"
        )
        | {operator.getitem, AFTER},
        _passed,
    ),
    **dict.fromkeys(aten_ops("embedding gather index.Tensor index_select"), _widest_at(0)),
    **dict.fromkeys((_aten.full.default, _aten.full_like.default), _widest_at(1)),
    _aten.scalar_tensor.default: _widest_at(0),
    _aten.constant_pad_nd.default: _widest_at(0, 2),
    _aten.where.self: _selected,
    **dict.fromkeys(
        aten_ops(
            "scatter.src scatter_add addmm bmm ceil convolution cos cumsum elu floor gelu leaky_relu mm "
            "_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training native_group_norm "
            "native_layer_norm neg round rsub.Scalar sin upsample_bilinear2d.vec upsample_nearest2d.vec"
        )
        | _RECURRENT,
        _computed(ValueRange.FINITE, ValueRange.FINITE),
    ),
    # A row of nothing but minus infinity makes NaN.
    _aten._log_softmax.default: _computed(ValueRange.FINITE, ValueRange.FINITE),
    _aten._softmax.default: _computed(ValueRange.FINITE, ValueRange.NONNEGATIVE),
    **dict.fromkeys(aten_ops("erf sign tanh"), _computed(ValueRange.BELOW, ValueRange.FINITE)),
    _aten.sigmoid.default: _computed(ValueRange.BELOW, ValueRange.NONNEGATIVE),
    _aten.exp.default: _exponential,
    _aten.log.default: _logarithm,
    _aten.log1p.default: _at_least(ValueRange.NONNEGATIVE, ValueRange.NONNEGATIVE),
    _aten.sqrt.default: _at_least(ValueRange.NONNEGATIVE, ValueRange.NONNEGATIVE),
    **dict.fromkeys(aten_ops("reciprocal rsqrt"), _computed(ValueRange.POSITIVE, ValueRange.POSITIVE)),
    _aten.abs.default: _at_least(ValueRange.NONNEGATIVE, ValueRange.FINITE),
    _aten.relu.default: _at_least(ValueRange.NONNEGATIVE, ValueRange.BELOW),
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar), _added),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar), _subtracted),
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar), _multiplied),
    **dict.fromkeys((_aten.div.Tensor, _aten.div.Scalar), _divided),
    _aten.pow.Tensor_Scalar: _powered,
    _aten.clamp.default: _clamped("min"),
    _aten.clamp_min.default: _clamped("min"),
    _aten.hardtanh.default: _clamped("min_val"),
    **dict.fromkeys(aten_ops("amax maximum max_pool2d_with_indices"), _largest),
}
