"""Weight gradients of depthwise convolutions, found in an ONNX graph as :mod:`edgefl_export.decompositions.convolution`
writes them: one product and one sum for each position of the kernel, channels last, side by side as [C, positions]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, helper, numpy_helper

from edgefl_export.onnx.blocked.layout import AXES, BLOCK, BlockedLayout
from edgefl_export.onnx.values import GraphValues, attributes

_CHANNELS_LAST = [0, 2, 3, 1]
_SLICE_INPUTS = 5
_PAD_INPUTS = 3
_SPACE = (1, 2)


@dataclass(frozen=True)
class DepthwiseGradient:
    """Weight gradient dL/dw[c, k] = sum_{n, p} dL/dy[n, c, p] x[n, c, p * stride + k * dilation - padding] in a graph.

    ``x`` and ``grad`` name the values [N, C, H, W] and [N, C, *P]. The other fields are by spatial axis.
    """

    x: str
    grad: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]


class DepthwiseGradientFinder:
    """Finder of weight gradients of depthwise convolutions in an ONNX graph.

    The last node of such a gradient concatenates one sum for each kernel position.
    """

    def __init__(self, values: GraphValues) -> None:
        self._values = values

    def gradient(self, node: NodeProto) -> DepthwiseGradient | None:
        """Return the depthwise weight gradient whose result ``node`` computes, or None if ``node`` computes something
        else.
        """
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
        return self._match_windows(grads[0], [(start, step) for _, start, step in found], found[0][0])

    def _match_windows(
        self, grad: str, windows: list[tuple[tuple[int, ...], tuple[int, ...]]], padded: str
    ) -> DepthwiseGradient | None:
        """Return the gradient if windows (begins, steps) of ``padded`` lie at all positions of a kernel, row by row.

        Return None otherwise.
        """
        source, padding = self._match_padded(padded)
        given = self._match_channels_last(grad)
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
        """Return (dL/dy, window of x), channels last, if ``name`` is the sum of their product over all other axes.

        Return None otherwise.
        """
        column = self._values.maker(name, "Unsqueeze")
        if self._numbers(self._input(column, 1)) != [1]:
            return None
        product = self._values.maker(self._match_sum(self._input(column, 0)), "Mul")
        return (product.input[0], product.input[1]) if product else None

    def _match_sum(self, name: str) -> str:
        """Return the value whose sum over all axes but the last is ``name``, or "".

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
        """Return (source, begins, steps) if the value ``name`` is a window of a value ``source``, else None.

        The first entries and the steps are by spatial axis.
        """
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

    def _match_padded(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (value [N, C, H, W], zeros before it by axis) if ``name`` is that value channels last, padded with zeros.

        The value is "" if ``name`` is something else.
        """
        node, padding = self._values.maker(name, "Pad"), [0, 0]
        if node is not None:
            pads = self._numbers(self._input(node, 1)) or []
            zeros = len(node.input) < _PAD_INPUTS or self._is(node.input[2], 0.0)
            constant = _attribute(node, "mode") in (None, b"constant")
            if pads != [0, *pads[1:3], 0] * 2 or not zeros or not constant:
                return "", ()
            name, padding = node.input[0], pads[1:3]
        return self._match_channels_last(name), tuple(padding)

    def _match_channels_last(self, name: str) -> str:
        """Return the value [N, C, H, W] that ``name`` is with channels last, or "" if there is none."""
        node = self._values.maker(name, "Transpose")
        last = node is not None and _attribute(node, "perm") == _CHANNELS_LAST
        return node.input[0] if node is not None and last else ""

    def _input(self, node: NodeProto | None, place: int) -> str:
        return node.input[place] if node is not None and place < len(node.input) else ""

    def _is(self, name: str, number: float) -> bool:
        """Return True if ``name`` is a constant whose entries all equal ``number``."""
        constant = self._values.constants.get(name)
        return constant is not None and bool((numpy_helper.to_array(constant) == number).all())

    def _numbers(self, name: str) -> list[int] | None:
        numbers = self._values.whole(name)
        return None if numbers is None else list(numbers)


def _attribute(node: NodeProto, name: str) -> Any:
    return next((helper.get_attribute_value(each) for each in node.attribute if each.name == name), None)


# Convolutions on the blocked layout, transposed ones of stride 1 and weight gradients of depthwise ones included.
#
# Left alone are kernels of one position, whose products gain nothing, other groups than one for each channel, and a first
# layer of few channels, whose kernel is no faster. The weight gradient of a depthwise convolution is one of them, too: each
# channel of each sample is a channel there, with dL/dy as its kernel, and both are in that layout already.

_END = 2**62


class ConvolutionRules:
    """Rules that write convolutions on the blocked layout (channels in blocks of a register's size).

    ``count`` is the number of convolutions written so far.
    """

    def __init__(self, layout: BlockedLayout) -> None:
        self.count = 0
        self._layout = layout
        self._gradients = DepthwiseGradientFinder(layout.values)

    def add(self, node: NodeProto) -> bool:
        """Write ``node`` on the blocked layout (NCHWc) if it is a convolution that fits.

        Return False and write nothing for any other node.
        """
        if node.domain:
            return False
        if node.op_type == "Concat":
            return self._is_gradient(node)
        if not self.fits(node):
            return False
        if node.op_type == "Conv":
            self._convolution(node, node.input[1], attributes(node))
        else:
            self._convolution(node, *self._flip(node.input[1], attributes(node)))
        self.count += 1
        return True

    def fits(self, node: NodeProto) -> bool:
        """Return True if ``node`` is a convolution that can be written on the blocked layout (NCHWc)."""
        if node.op_type == "ConvTranspose":
            return self._fits_transposed(node, attributes(node))
        return node.op_type == "Conv" and not node.domain and self._fits(node)

    def _convolution(self, node: NodeProto, weight: str, options: Mapping[str, Any]) -> None:
        x, _, *bias = node.input
        kernel = self._weight(weight, options.get("group", 1))
        result, activation = self._layout.activated(node.output[0])
        twin = self._layout.call("Conv", [self._layout.twin(x), kernel, *bias], **options, **activation)
        self._layout.keep(result, twin, self._layout.shapes[node.output[0]])

    def _is_gradient(self, node: NodeProto) -> bool:
        gradient = self._gradients.gradient(node)
        if gradient is None or not (
            self._layout.is_image(gradient.x) and self._layout.is_image(gradient.grad)
        ):
            return False
        self._weight_gradient(gradient, node.output[0])
        self.count += 1
        return True

    def _fits_transposed(self, node: NodeProto, options: Mapping[str, Any]) -> bool:
        """Return True if a transposed convolution equals a plain one with the flipped kernel."""
        inner, _, *kernel = self._layout.shapes.get(node.input[1], (0, 0))
        plain = {*options.get("strides", (1,))} == {1} and not any(options.get("output_padding", ()))
        padded = options.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in options
        known = padded and options.get("group", 1) == 1
        if (
            len(kernel) != len(_SPACE)
            or math.prod(kernel) <= 1
            or inner % BLOCK
            or not self._layout.is_image(node.output[0])
            or not (plain and known)
        ):
            return False
        return min(_turned_pads(kernel, options)) >= 0

    def _flip(self, weight: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return (name of the flipped kernel [O, I, h, w], attributes) of the plain convolution that replaces a
        transposed one.
        """
        inner, out, *kernel = self._layout.shapes[weight]
        bounds = ((-1, -1), (-_END, -_END), (2, 3), (-1, -1))
        turned = self._layout.call("Slice", [weight, *map(self._layout.sizes, bounds)], domain="")
        swapped = self._layout.call("Transpose", [turned], domain="", perm=[1, 0, 2, 3])
        self._layout.shapes[swapped] = (out, inner, *kernel)
        kept = {name: value for name, value in options.items() if name in ("dilations", "group")}
        return swapped, kept | {
            "pads": _turned_pads(kernel, options),
            "kernel_shape": kernel,
            "strides": [1, 1],
        }

    def _weight_gradient(self, gradient: DepthwiseGradient, result: str) -> None:
        """Write ``result``, a weight gradient [C, positions], as a convolution: stride and dilation are exchanged,
        samples are summed.
        """
        x, grad = self._layout.shapes[gradient.x], self._layout.shapes[gradient.grad]
        samples, channels = x[:2]
        axes = (x[2:], grad[2:], gradient.kernel, gradient.stride, gradient.dilation, gradient.padding)
        ends = [(q - 1) * s + (k - 1) * d + 1 - size - p for size, q, k, s, d, p in zip(*axes, strict=True)]
        summed = self._layout.call(
            "Conv",
            [
                self._layout.reshaped(self._layout.twin(gradient.x), (1, samples * channels, *x[2:])),
                self._layout.reshaped(self._layout.twin(gradient.grad), (samples * channels, 1, *grad[2:])),
            ],
            group=samples * channels,
            pads=[*gradient.padding, *(max(end, 0) for end in ends)],
            strides=gradient.dilation,
            dilations=gradient.stride,
        )
        rows = self._layout.call("ReorderOutput", [summed], channels=samples * channels)
        if (
            min(ends) < 0
        ):  # a stride that does not divide the input: sums that belong to no position of the kernel
            bounds = (0, 0), gradient.kernel, (2, 3)
            rows = self._layout.call("Slice", [rows, *map(self._layout.sizes, bounds)], domain="")
        positions = math.prod(gradient.kernel)
        ones = self._layout.filled(1.0, 1, samples)  # see :mod:`edgefl_export.onnx.passes`
        each = self._layout.reshaped(rows, (samples, channels * positions))
        total = self._layout.call("MatMul", [ones, each], domain="")
        self._layout.emit("Reshape", [total, self._layout.sizes((channels, positions))], result, domain="")

    def _fits(self, node: NodeProto) -> bool:
        weight = self._layout.shapes.get(node.input[1], ())
        if len(weight) != AXES or not self._layout.is_image(node.output[0]) or math.prod(weight[2:]) == 1:
            return False
        own = _groups(node) == weight[0] and weight[1] == 1
        return own or (_groups(node) == 1 and weight[1] % BLOCK == 0)

    def _weight(self, weight: str, groups: int) -> str:
        out, *rest = shape = self._layout.shapes[weight]
        inner = weight if groups > 1 else self._layout.call("ReorderInput", [weight])
        rows = self._layout.reshaped(inner, (1, out, math.prod(rest), 1))
        return self._layout.reshaped(self._layout.call("ReorderInput", [rows]), shape)


def _turned_pads(kernel: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """Return the padding of the plain convolution for a transposed one: all begins, then all ends."""
    dilations, pads = options.get("dilations", [1] * len(kernel)), options.get("pads", [0] * 2 * len(kernel))
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    return [each - pad for each, pad in zip(reach * 2, pads, strict=True)]


def _groups(node: NodeProto) -> int:
    return next((int(each.i) for each in node.attribute if each.name == "group"), 1)
