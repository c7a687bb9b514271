"""Convolutions on a blocked layout: channels in blocks of as many numbers as a processor's registers hold.

onnxruntime has kernels for that, the domain ``com.microsoft.nchwc``, and takes them by itself where weights are constants.
In training they are inputs. So the graph brings inputs and weights into that layout itself, with the op that onnxruntime has
for inputs, which knows how large a block is::

    x [N, C, H, W]    -> ReorderInput                              -> [N][C/b][H W][b]
    w [O, C, h, w]    -> ReorderInput                              -> [O][C/b][h w][b]
                      -> as [1, O, C h w, 1] -> ReorderInput       -> [O/b][C/b][h w][b][b]

The weight gradient of a depthwise convolution is one of them, too: each channel of each sample is a channel there, with
dL/dy as its kernel, and both are in that layout already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from exporters.onnx.depthwise_gradient import DepthwiseGradient, Finder

DOMAIN = "com.microsoft.nchwc"
_END = 2**62
BLOCK = 16
"""The largest block of any processor, which the others divide: channels come in multiples of it."""


def blocked(model: bytes) -> bytes | None:
    """The ONNX model with its spatial convolutions on the blocked layout, transposed ones of stride 1 among them, and weight
    gradients of depthwise ones; None where none of them fits.

    Left alone are kernels of one position, whose products gain nothing, other groups than one for each channel, and a first
    layer of few channels, whose kernel is no faster.
    """
    proto = onnx.load_from_string(model)
    writer = _Writer(proto.graph)
    for node in proto.graph.node:
        writer.add(node)
    if not writer.count:
        return None
    read = writer.nodes_that_are_read({value.name for value in proto.graph.output})
    del proto.graph.node[:]
    proto.graph.node.extend(read)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return bytes(proto.SerializeToString(deterministic=True))


class _Writer:
    """Writes a graph's nodes anew; ``count`` convolutions were replaced."""

    def __init__(self, graph: Any) -> None:
        self.nodes: list[NodeProto] = []
        self.count = 0
        self._graph = graph
        self._shapes = {
            value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._gradients = Finder(graph, self._shapes)
        self._sizes: dict[tuple[int, ...], str] = {}
        self._reordered: dict[str, str] = {}

    def add(self, node: NodeProto) -> None:
        gradient = self._gradients.gradient(node)
        if gradient is not None and self._has_channels(gradient.x) and self._has_channels(gradient.grad):
            self._weight_gradient(gradient, node.output[0])
            return
        options = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        x, weight, *bias = node.input if node.op_type in ("Conv", "ConvTranspose") else ("", "")
        if node.op_type == "ConvTranspose" and not node.domain and self._fits_transposed(weight, options):
            weight, options = self._turned(weight, options)
        elif node.op_type != "Conv" or node.domain or not self._fits(node):
            self.nodes.append(node)
            return
        self.count += 1
        inputs = [self._input(x), self._weight(weight, options.get("group", 1)), *bias]
        result = self._call("Conv", inputs, **options)
        self._emit("ReorderOutput", [result], node.output[0], channels=self._shapes[weight][0])

    def _fits_transposed(self, weight: str, options: Mapping[str, Any]) -> bool:
        """Whether a transposed convolution is a plain one with the kernel turned around."""
        inner, out, *kernel = self._shapes.get(weight, (0, 0))
        plain = {*options.get("strides", (1,))} == {1} and not any(options.get("output_padding", ()))
        padded = options.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in options
        known = padded and options.get("group", 1) == 1
        if (
            len(kernel) != 2
            or math.prod(kernel) <= 1
            or inner % BLOCK
            or out % BLOCK
            or not (plain and known)
        ):
            return False
        return min(_turned_pads(kernel, options)) >= 0

    def _turned(self, weight: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The kernel of a transposed convolution [I, O, h, w] as [O, I, h, w] from behind, and the plain one's options."""
        inner, out, *kernel = self._shapes[weight]
        bounds = ((-1, -1), (-_END, -_END), (2, 3), (-1, -1))
        turned = self._call("Slice", [weight, *map(self._numbers, bounds)], domain="")
        swapped = self._call("Transpose", [turned], domain="", perm=[1, 0, 2, 3])
        self._shapes[swapped] = (out, inner, *kernel)
        kept = {name: value for name, value in options.items() if name in ("dilations", "group")}
        return swapped, kept | {
            "pads": _turned_pads(kernel, options),
            "kernel_shape": kernel,
            "strides": [1, 1],
        }

    def nodes_that_are_read(self, outputs: set[str]) -> list[NodeProto]:
        """The nodes, without those that made something for what is written anew."""
        read, kept = set(outputs), []
        for node in reversed(self.nodes):
            if any(name in read for name in node.output):
                read.update(node.input)
                kept.append(node)
        return kept[::-1]

    def _weight_gradient(self, gradient: DepthwiseGradient, result: str) -> None:
        """[C, positions]: stride and dilation change places, and the results of the samples are summed."""
        self.count += 1
        x, grad = self._shapes[gradient.x], self._shapes[gradient.grad]
        samples, channels = x[:2]
        axes = (x[2:], grad[2:], gradient.kernel, gradient.stride, gradient.dilation, gradient.padding)
        ends = [(q - 1) * s + (k - 1) * d + 1 - size - p for size, q, k, s, d, p in zip(*axes, strict=True)]
        summed = self._call(
            "Conv",
            [
                self._reshaped(self._input(gradient.x), (1, samples * channels, *x[2:])),
                self._reshaped(self._input(gradient.grad), (samples * channels, 1, *grad[2:])),
            ],
            group=samples * channels,
            pads=[*gradient.padding, *(max(end, 0) for end in ends)],
            strides=gradient.dilation,
            dilations=gradient.stride,
        )
        rows = self._call("ReorderOutput", [summed], channels=samples * channels)
        if (
            min(ends) < 0
        ):  # a stride that does not divide the input: sums that belong to no position of the kernel
            bounds = (0, 0), gradient.kernel, (2, 3)
            rows = self._call("Slice", [rows, *map(self._numbers, bounds)], domain="")
        each = self._reshaped(rows, (samples, channels, math.prod(gradient.kernel)))
        self._emit("ReduceSum", [each, self._numbers((0,))], result, domain="", keepdims=0)

    def _has_channels(self, name: str) -> bool:
        shape = self._shapes.get(name, ())
        return len(shape) == 4 and all(shape) and shape[1] % BLOCK == 0

    def _fits(self, node: NodeProto) -> bool:
        weight = self._shapes.get(node.input[1], ())
        if len(weight) != 4 or weight[0] % BLOCK or math.prod(weight[2:]) == 1:
            return False
        own = _groups(node) == weight[0] and weight[1] == 1
        return own or (_groups(node) == 1 and weight[1] % BLOCK == 0)

    def _input(self, x: str) -> str:
        if x not in self._reordered:
            self._reordered[x] = self._call("ReorderInput", [x])
        return self._reordered[x]

    def _weight(self, weight: str, groups: int) -> str:
        out, *rest = shape = self._shapes[weight]
        inner = weight if groups > 1 else self._call("ReorderInput", [weight])
        rows = self._reshaped(inner, (1, out, math.prod(rest), 1))
        return self._reshaped(self._call("ReorderInput", [rows]), shape)

    def _reshaped(self, value: str, shape: tuple[int, ...]) -> str:
        return self._call("Reshape", [value, self._numbers(shape)], domain="")

    def _numbers(self, numbers: tuple[int, ...]) -> str:
        if numbers not in self._sizes:
            self._sizes[numbers] = f"blocked_size{len(self._sizes)}"
            constant = numpy_helper.from_array(np.array(numbers, np.int64), self._sizes[numbers])
            self._graph.initializer.append(constant)
        return self._sizes[numbers]

    def _call(self, op: str, inputs: Sequence[str], **options: Any) -> str:
        result = f"blocked{len(self.nodes)}"
        self._emit(op, inputs, result, **options)
        return result

    def _emit(
        self, op: str, inputs: Sequence[str], result: str, domain: str = DOMAIN, **options: Any
    ) -> None:
        name = f"{op}_b{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [result], name=name, domain=domain, **options))


def _turned_pads(kernel: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """Of the plain convolution that a transposed one is, begins and then ends."""
    dilations, pads = options.get("dilations", [1] * len(kernel)), options.get("pads", [0] * 2 * len(kernel))
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    return [each - pad for each, pad in zip(reach * 2, pads, strict=True)]


def _groups(node: NodeProto) -> int:
    return next((int(each.i) for each in node.attribute if each.name == "group"), 1)
