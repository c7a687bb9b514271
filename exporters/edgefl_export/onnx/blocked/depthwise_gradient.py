"""Weight gradients of depthwise convolutions, found in an ONNX graph as :mod:`edgefl_export.decompositions.convolution`
writes them: one product and one sum for each position of the kernel, channels last, side by side as [C, positions]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, helper, numpy_helper

from edgefl_export.onnx.values import GraphValues

_CHANNELS_LAST = [0, 2, 3, 1]
_SLICE_INPUTS = 5
_PAD_INPUTS = 3
_SPACE = (1, 2)


@dataclass(frozen=True)
class DepthwiseGradient:
    """dL/dw[c, k] = sum_{n, p} dL/dy[n, c, p] x[n, c, p * stride + k * dilation - padding].

    ``x`` and ``grad``: names of the values, [N, C, H, W] and [N, C, *P]. The others by axis of space.
    """

    x: str
    grad: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]


class Finder:
    """Finder of these gradients by the node that joins their sums."""

    def __init__(self, values: GraphValues) -> None:
        self._values = values

    def gradient(self, node: NodeProto) -> DepthwiseGradient | None:
        """Return the gradient that ``node`` is; None for another node."""
        if node.op_type != "Concat" or _attribute(node, "axis") != 1:
            return None
        products = [self._product(name) for name in node.input]
        if any(product is None for product in products):
            return None
        grads, windows = zip(*(product for product in products if product), strict=True)
        sources = [self._window(name) for name in windows]
        found = [source for source in sources if source is not None]
        if len({*grads}) != 1 or len(found) != len(sources) or len({name for name, _, _ in found}) != 1:
            return None
        return self._joined(grads[0], [(start, step) for _, start, step in found], found[0][0])

    def _joined(
        self, grad: str, windows: list[tuple[tuple[int, ...], tuple[int, ...]]], padded: str
    ) -> DepthwiseGradient | None:
        """Return the gradient of windows that begin at all positions of a kernel, row by row."""
        source, padding = self._padded(padded)
        given = self._transposed(grad)
        starts, steps = [start for start, _ in windows], {step for _, step in windows}
        axes = [sorted({start[axis] for start in starts}) for axis in range(len(_SPACE))]
        if not source or not given or len(steps) != 1:
            return None
        if starts != [(row, column) for row in axes[0] for column in axes[1]]:
            return None
        dilation = [places[1] if len(places) > 1 else 1 for places in axes]
        if any(
            places != [k * d for k in range(len(places))] for places, d in zip(axes, dilation, strict=True)
        ):
            return None
        kernel = tuple(map(len, axes))
        return DepthwiseGradient(source, given, kernel, steps.pop(), tuple(dilation), padding)

    def _product(self, name: str) -> tuple[str, str] | None:
        """Return (dL/dy, window of x), both channels last, of one sum of products over all but channels."""
        column = self._values.maker(name, "Unsqueeze")
        if self._numbers(self._input(column, 1)) != [1]:
            return None
        product = self._values.maker(self._summed(self._input(column, 0)), "Mul")
        return (product.input[0], product.input[1]) if product else None

    def _summed(self, name: str) -> str:
        """Return the value that was summed over all axes but the last, or "".

        A large sum is a product with ones (:class:`edgefl_export.onnx.passes.SumsToProducts`).
        """
        total = self._values.maker(name, "ReduceSum")
        if total is not None:
            axes = self._numbers(self._input(total, 1))
            return "" if axes != [0, 1, 2] or _attribute(total, "keepdims") else self._input(total, 0)
        product = self._values.maker(self._input(self._values.maker(name, "Reshape"), 0), "MatMul")
        ones = self._values.maker(self._input(product, 0), "Expand")
        flat = self._values.maker(self._input(product, 1), "Reshape")
        found = self._input(flat, 0)
        sizes = self._values.shapes.get(found, ())
        whole = self._numbers(self._input(flat, 1)) == [math.prod(sizes[:-1]), *sizes[-1:]]
        return found if self._is(self._input(ones, 0), 1.0) and whole else ""

    def _window(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
        """Return source, begins and steps of a window along the axes of space."""
        node = self._values.maker(name, "Slice")
        if node is None:
            return name, (0, 0), (1, 1)
        lists = [self._numbers(self._input(node, place)) for place in range(1, _SLICE_INPUTS)]
        if any(each is None for each in lists):
            return None
        starts, _, axes, steps = (each or [] for each in lists)
        if not {*axes} <= {*_SPACE}:
            return None
        start, step = dict(zip(axes, starts, strict=True)), dict(zip(axes, steps, strict=True))
        return node.input[0], tuple(start.get(a, 0) for a in _SPACE), tuple(step.get(a, 1) for a in _SPACE)

    def _padded(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the channels-second tensor that ``name`` is with channels last and zeros around, and the padding at the
        begins.
        """
        node, padding = self._values.maker(name, "Pad"), [0, 0]
        if node is not None:
            pads = self._numbers(self._input(node, 1)) or []
            zeros = len(node.input) < _PAD_INPUTS or self._is(node.input[2], 0.0)
            constant = _attribute(node, "mode") in (None, b"constant")
            if pads != [0, *pads[1:3], 0] * 2 or not zeros or not constant:
                return "", ()
            name, padding = node.input[0], pads[1:3]
        return self._transposed(name), tuple(padding)

    def _transposed(self, name: str) -> str:
        """Return the channels-second tensor that ``name`` is with channels last; "" if there is none."""
        node = self._values.maker(name, "Transpose")
        last = node is not None and _attribute(node, "perm") == _CHANNELS_LAST
        return node.input[0] if node is not None and last else ""

    def _input(self, node: NodeProto | None, place: int) -> str:
        return node.input[place] if node is not None and place < len(node.input) else ""

    def _is(self, name: str, number: float) -> bool:
        """Return True for a constant with that number everywhere."""
        constant = self._values.constants.get(name)
        return constant is not None and bool((numpy_helper.to_array(constant) == number).all())

    def _numbers(self, name: str) -> list[int] | None:
        numbers = self._values.whole(name)
        return None if numbers is None else list(numbers)


def _attribute(node: NodeProto, name: str) -> Any:
    return next((helper.get_attribute_value(each) for each in node.attribute if each.name == name), None)
