"""Convolutions on the blocked layout, transposed ones of stride 1 and weight gradients of depthwise ones included.

Left alone are kernels of one position, whose products gain nothing, other groups than one for each channel, and a first
layer of few channels, whose kernel is no faster. The weight gradient of a depthwise convolution is one of them, too: each
channel of each sample is a channel there, with dL/dy as its kernel, and both are in that layout already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnx import NodeProto

from edgefl_export.onnx.blocked.depthwise_gradient import DepthwiseGradient, Finder
from edgefl_export.onnx.blocked.layout import AXES, BLOCK, BlockedLayout
from edgefl_export.onnx.values import attributes

_END = 2**62
_SPACE = 2


class Convolutions:
    """Rules for convolutions; ``count`` were replaced."""

    def __init__(self, layout: BlockedLayout) -> None:
        self.count = 0
        self._layout = layout
        self._gradients = Finder(layout.values)

    def add(self, node: NodeProto) -> bool:
        """Write a convolution anew; return False for any other node."""
        if node.domain:
            return False
        if node.op_type == "Concat":
            return self._is_gradient(node)
        if not self.fits(node):
            return False
        if node.op_type == "Conv":
            self._convolution(node, node.input[1], attributes(node))
        else:
            self._convolution(node, *self._turned(node.input[1], attributes(node)))
        self.count += 1
        return True

    def fits(self, node: NodeProto) -> bool:
        """Return True if a convolution has a form on the layout."""
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
        """Return True if a transposed convolution is a plain one with the kernel turned around."""
        inner, _, *kernel = self._layout.shapes.get(node.input[1], (0, 0))
        plain = {*options.get("strides", (1,))} == {1} and not any(options.get("output_padding", ()))
        padded = options.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in options
        known = padded and options.get("group", 1) == 1
        if (
            len(kernel) != _SPACE
            or math.prod(kernel) <= 1
            or inner % BLOCK
            or not self._layout.is_image(node.output[0])
            or not (plain and known)
        ):
            return False
        return min(_turned_pads(kernel, options)) >= 0

    def _turned(self, weight: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the kernel [I, O, h, w] of a transposed convolution as [O, I, h, w] reversed, and the plain one's
        options.
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
        """Write [C, positions]: stride and dilation change places, and the results of the samples are summed."""
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
    """Return the padding of the plain convolution for a transposed one, begins and then ends."""
    dilations, pads = options.get("dilations", [1] * len(kernel)), options.get("pads", [0] * 2 * len(kernel))
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    return [each - pad for each, pad in zip(reach * 2, pads, strict=True)]


def _groups(node: NodeProto) -> int:
    return next((int(each.i) for each in node.attribute if each.name == "group"), 1)
