"""Ops between convolutions, on the blocked layout.

Element-wise ops are the same there. A number for each channel becomes the kernel or the bias of a depthwise 1 x 1
convolution. A sum over all other axes is H W times the sum of the means of all samples::

    s x + b            -> Conv(x, s, b)
    sum_{n, h, w} x    -> H W sum_n GlobalAveragePool(x)
    batch norm         -> m = mean(x); x' = Conv(x, 1, -m); v = mean(x' x'); Conv(x', gamma / sqrt(v + eps), beta)

onnxruntime's own batch norm runs on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import onnx
from onnx import NodeProto, helper

from edgefl_export.onnx.blocked.convolution import ConvolutionRules
from edgefl_export.onnx.blocked.layout import ROOM, BlockedLayout
from edgefl_export.onnx.blocked.products import with_products
from edgefl_export.onnx.values import LAYOUT, GraphValues, Shape, attributes, live_peak

ENTRIES = {"Relu", "LeakyRelu", "HardSigmoid", "Sigmoid", "Tanh", "Neg", "Abs", "Clip"}
"""Ops whose every entry is made of the same entry of their first input; what others they have are numbers."""
PAIRS = {"Add", "Sub", "Mul", "Div"}
_ALL_BUT_CHANNELS = (0, 2, 3)
_CHANNELS_LAST = [0, 2, 3, 1]
_NORM_INPUTS, _STATISTICS = 3, 3
_EPSILON, _MOMENTUM = 1e-5, 0.9
"""BatchNormalization's, where it names none."""

Norm = tuple[str, ...]


class ImageRules:
    """Rules that write ops between convolutions on the blocked layout (NCHWc).

    Each rule returns True if it wrote the node.

    Args:
        nodes: nodes of the graph, in order.
        layout: writer of the new nodes.
        convolutions: rules for convolutions.
        left: batch norms to leave unchanged.
    """

    def __init__(
        self,
        nodes: Sequence[NodeProto],
        layout: BlockedLayout,
        convolutions: ConvolutionRules,
        left: Set[Norm] = frozenset(),
    ) -> None:
        self._layout = layout
        self._left = left
        self._norms: dict[Norm, set[bool]] = {}
        self._rules: dict[str, Callable[[NodeProto], bool]] = {
            **dict.fromkeys(ENTRIES, self._entries),
            **dict.fromkeys(PAIRS, self._pair),
            "BatchNormalization": self._batch_norm,
            "ReduceSum": self._sum,
            "Transpose": self._channels_last,
            "Reshape": self._reshape,
        }
        self._convolved: set[str] = set()
        self._elsewhere: set[str] = set()
        for node in reversed(nodes):
            self._look_ahead(node, convolutions.fits(node))

    def _look_ahead(self, node: NodeProto, fits: bool) -> None:
        """Update the sets of values that later nodes need on the blocked layout (``_convolved``) and off it
        (``_elsewhere``).

        It is called for all nodes, the last one first. ``fits``: ``node`` is a convolution that can be written on the
        layout.
        """
        images = node.input if node.op_type in PAIRS else node.input[:1]
        out = node.output[0]
        stays = node.op_type in {*ENTRIES, *PAIRS, "BatchNormalization"} or self._waits(node)
        if fits or (stays and out in self._convolved):
            self._convolved.update(images)
        elif not self._ends(node) and (not stays or out in self._elsewhere):
            self._elsewhere.update(node.input)

    def _pays(self, node: NodeProto) -> bool:
        """Return True if the node is worth writing on the blocked layout (NCHWc).

        Either a convolution on the layout depends on its result, or its operands are on the layout and no node off the
        layout needs its result.
        """
        out, images = node.output[0], filter(self._layout.is_image, node.input)
        inside = all(map(self._layout.is_inside, images))
        return out in self._convolved or (inside and out not in self._elsewhere) or self._ends(node)

    def _waits(self, node: NodeProto) -> bool:
        return node.op_type == "Reshape" and self._layout.waits(node)

    def _ends(self, node: NodeProto) -> bool:
        """Return True if the node reads an image on the blocked layout (NCHWc) but its result is no image, such as a
        sum over positions.
        """
        if node.op_type == "ReduceSum":
            axes = self._layout.values.whole(node.input[1]) if len(node.input) > 1 else None
            return axes is not None and sorted(axes) == list(_ALL_BUT_CHANNELS)
        if node.op_type == "Transpose":
            return attributes(node).get("perm") == _CHANNELS_LAST
        return node.op_type == "Reshape" and self._layout.values.is_waited_for(node.output[0])

    def add(self, node: NodeProto) -> bool:
        """Write ``node`` on the blocked layout (NCHWc) if a rule fits and that is worth it.

        Return False and write nothing otherwise.
        """
        if node.op_type == "BatchNormalization" and not node.domain:
            norm = self._norm(node)
            done = norm not in self._left and self._is_rewritten(node)
            self._norms.setdefault(norm, set()).add(done)
            return done
        return self._is_rewritten(node)

    def _is_rewritten(self, node: NodeProto) -> bool:
        if node.domain or not any(map(self._layout.is_inside, node.input)):
            return False
        rule = self._rules.get(node.op_type)
        return rule is not None and self._pays(node) and rule(node)

    def torn(self) -> set[Norm]:
        """Return the batch norms of which one copy is on the blocked layout (NCHWc) and an equal, recomputed one is not.

        The two would round differently. A comparison of their results, as in the gradient of a maximum, would find no
        equal ones.
        """
        return {norm for norm, forms in self._norms.items() if len(forms) > 1}

    def _norm(self, node: NodeProto) -> Norm:
        """Return the operand of a batch norm, without delays, and its statistics: a key that equal norms share."""
        x, *others = node.input[:_NORM_INPUTS]
        while (waiting := self._layout.values.maker(x, "Reshape")) is not None and self._waits(waiting):
            x = waiting.input[0]
        return (x, *others)

    def _entries(self, node: NodeProto) -> bool:
        x, *numbers = node.input
        if not self._layout.is_inside(x):
            return False
        twin = self._layout.call(
            node.op_type, [self._layout.twin(x), *numbers], domain="", **attributes(node)
        )
        self._layout.keep(node.output[0], twin, self._layout.shapes[x])
        return True

    def _pair(self, node: NodeProto) -> bool:
        left, right = node.input
        shape = self._layout.shapes[left if self._layout.is_inside(left) else right]
        shapes = [self._layout.shapes.get(name) for name in node.input]
        per_channel = [(shape[1], 1, 1), (1, shape[1], 1, 1)]
        if shapes == [shape, shape] and all(map(self._layout.is_image, node.input)):
            twin = self._layout.call(
                node.op_type, [self._layout.twin(name) for name in node.input], domain=""
            )
        elif any(each in ((), (1,)) for each in shapes):
            inputs = [
                self._layout.twin(name) if found == shape else name
                for name, found in zip(node.input, shapes, strict=True)
            ]
            twin = self._layout.call(node.op_type, inputs, domain="")
        elif shapes[0] == shape and shapes[1] in per_channel and node.op_type != "Div":
            twin = self._with_channels(node.op_type, left, right, shape)
        elif shapes[1] == shape and shapes[0] in per_channel and node.op_type in ("Add", "Mul"):
            twin = self._with_channels(node.op_type, right, left, shape)
        else:
            return False
        self._layout.keep(node.output[0], twin, shape)
        return True

    def _with_channels(self, op: str, x: str, numbers: str, shape: Shape) -> str:
        """Write the sum, difference or product of x and a number for each channel.

        Args:
            op: ``Add``, ``Sub`` or ``Mul``.
            x: name of the image.
            numbers: name of the numbers, one for each channel.
            shape: shape [N, C, H, W] of the image.

        Returns:
            Name of the result on the blocked layout (NCHWc).
        """
        channels = shape[1]
        if op == "Mul":
            return self._scale(self._layout.twin(x), self._flat(numbers, channels), channels)
        bias = self._flat(numbers, channels)
        if op == "Sub":
            bias = self._layout.call("Neg", [bias], domain="")
        return self._shift(self._layout.twin(x), bias, channels)

    def _flat(self, numbers: str, channels: int) -> str:
        """Return the name of [C] numbers that were reshaped to broadcast between other axes."""
        made = self._layout.values.maker(numbers, "Reshape")
        if made is not None and self._layout.shapes.get(made.input[0]) == (channels,):
            return str(made.input[0])
        return self._layout.reshaped(numbers, (channels,))

    def _scale(self, twin: str, scale: str, channels: int, *bias: str, **options: Any) -> str:
        """Write scale x + bias, with ``scale`` and ``bias`` [C], as a depthwise 1 x 1 convolution on the blocked
        layout (NCHWc).

        ``twin`` is the name of x on that layout. Return the name of the result on it.
        """
        kernel = self._layout.reshaped(scale, (channels, 1, 1, 1))
        return self._layout.call(
            "Conv", [twin, kernel, *bias], group=channels, kernel_shape=[1, 1], **options
        )

    def _shift(self, twin: str, bias: str, channels: int) -> str:
        ones = self._layout.filled(1.0, channels, 1, 1, 1)
        shifted = self._layout.call("Conv", [twin, ones, bias], group=channels, kernel_shape=[1, 1])
        self._layout.shapes[shifted] = self._layout.shapes[twin]
        return shifted

    def _mean(self, twin: str, result: str) -> None:
        """Write ``result`` [C], the means over all other axes of the value [N, C, H, W] that is called ``twin`` on the
        blocked layout (NCHWc).
        """
        pooled, axes = self._layout.call("GlobalAveragePool", [twin]), self._layout.sizes(_ALL_BUT_CHANNELS)
        self._layout.emit("ReduceMean", [pooled, axes], result, domain="", keepdims=0)

    def _batch_norm(self, node: NodeProto) -> bool:
        x, scale, bias, mean, variance = node.input
        options, layout = attributes(node), self._layout
        trains = bool(options.get("training_mode", 0))
        # Mixed with those that it was given, its statistics would be others.
        known = not trains or (options.get("momentum", _MOMENTUM) == 0.0 and len(node.output) == _STATISTICS)
        if not layout.is_inside(x) or not known:
            return False
        twin, channels = layout.twin(x), layout.shapes[x][1]
        if trains:
            mean, variance = node.output[1:]
            self._mean(twin, mean)
            twin = self._shift(twin, self._plain("Neg", mean), channels)
            self._mean(self._plain("Mul", twin, twin), variance)
        epsilon = layout.filled(options.get("epsilon", _EPSILON))
        scale = self._plain("Div", scale, self._plain("Sqrt", self._plain("Add", variance, epsilon)))
        if not trains:
            bias = self._plain("Sub", bias, self._plain("Mul", mean, scale))
        result, activation = layout.activated(node.output[0])
        layout.keep(result, self._scale(twin, scale, channels, bias, **activation), layout.shapes[x])
        return True

    def _plain(self, op: str, *inputs: str) -> str:
        return self._layout.call(op, inputs, domain="")

    def _sum(self, node: NodeProto) -> bool:
        """Write a sum over samples and positions; return True if the node is one."""
        x, axes = node.input
        if not self._layout.is_inside(x) or not self._ends(node):
            return False
        positions = math.prod(self._layout.shapes[x][2:])
        pooled = self._layout.call("GlobalAveragePool", [self._layout.twin(x)])
        kept = attributes(node).get("keepdims", 1)
        means = self._layout.call("ReduceSum", [pooled, axes], domain="", keepdims=kept)
        self._layout.emit("Mul", [means, self._layout.filled(positions)], node.output[0], domain="")
        return True

    def _channels_last(self, node: NodeProto) -> bool:
        """Write a transposition to channels last by the conversion out of the layout, which runs on all threads. Return
        True if ``node`` is one.
        """
        x = node.input[0]
        if not self._ends(node):
            return False
        options: dict[str, Any] = {"channels": self._layout.shapes[x][1], "channels_last": 1}
        self._layout.emit("ReorderOutput", [self._layout.twin(x)], node.output[0], **options)
        return True

    def _reshape(self, node: NodeProto) -> bool:
        """Write ``node`` on the blocked layout (NCHWc) if it is a Reshape of an image on it that only delays a value.

        A Reshape is also written if it reads the first entry of an image, which is the same entry in both layouts.
        Return True if ``node`` was written.
        """
        x, shape = node.input
        if not self._layout.is_inside(x):
            return False
        if self._waits(node):
            twin = self._layout.call("Reshape", [self._layout.twin(x), shape], domain="")
            self._layout.keep(node.output[0], twin, self._layout.shapes[x])
            return True
        if not self._ends(node):
            return False
        self._layout.emit("Reshape", [self._layout.twin(x), shape], node.output[0], domain="")
        return True


def write_blocked(model: bytes, room: float = ROOM) -> bytes | None:
    """Return the ONNX model with its spatial convolutions and large products on the blocked layout (NCHWc), or None if
    nothing fits.

    Ops between them are on it, too, if values then need at most ``room`` times their memory. For products see
    :mod:`edgefl_export.onnx.blocked.products`.
    """
    most = room * live_peak(GraphValues(onnx.load_from_string(model).graph))
    for through, products in ((True, True), (True, False), (False, True)):
        if form := _write(model, most, through=through, products=products):
            return form
    return _write(model, math.inf, through=False, products=False)


def _write(model: bytes, most: float, *, through: bool, products: bool) -> bytes | None:
    """Return the model on the blocked layout (NCHWc), or None if nothing fits or values need more than ``most`` entries at
    once.

    ``through``: also write ops between convolutions on it. ``products``: also write large products on it.
    """
    left = set[Norm]()
    while True:
        proto = onnx.load_from_string(model)
        layout = BlockedLayout(proto.graph)
        convolutions = ConvolutionRules(layout)
        images = ImageRules(proto.graph.node if through else (), layout, convolutions, left)
        for node in proto.graph.node:
            taken = node.output[0] in layout.done or convolutions.add(node)
            if not (taken or (through and images.add(node))):
                layout.nodes.append(node)
        if not (torn := images.torn()):
            break
        left |= torn
    nodes = layout.finished({value.name for value in proto.graph.output})
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    count = convolutions.count + (with_products(proto.graph) if products else 0)
    if not count or live_peak(GraphValues(proto.graph)) > most:
        return None
    proto.opset_import.append(helper.make_opsetid(LAYOUT, 1))
    return bytes(proto.SerializeToString(deterministic=True))
