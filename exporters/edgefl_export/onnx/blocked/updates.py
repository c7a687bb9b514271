"""Updates of large state in fewer passes: a number times a tensor plus another is one op on the blocked layout.

    m <- mu m + d w + g;  w <- w - lr m

takes a product and a sum for each term elsewhere. Entry by entry the order of the numbers does not matter, so tensors are
taken as images of one block of channels as they lie::

    t = mu m;  t = Conv(w, d, sum t);  m.next = t + g;  w.next = Conv(m.next, -lr, sum w)

State is read and written in that shape by ports of its rows (:mod:`edgefl.wire.bundle.graphs`): to bring an output of a
graph into another shape is a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from edgefl.wire.bundle.graphs import parse_rows, rows_of_port
from edgefl_export.artifact import REWRITTEN
from edgefl_export.onnx.blocked.layout import AXES, BLOCK, ROOM
from edgefl_export.onnx.values import (
    LAYOUT,
    ConstantInts,
    GraphValues,
    Shape,
    live_peak,
    read_by,
    replace_entries,
)

LEAST = 1 << 15
"""Numbers of a tensor; the views of a smaller one take as long as the passes."""
_STATE = "state."
_PARTS = (8, 4, 2)
"""Rows of an image: threads divide it by them."""


def write_sums(model: bytes) -> bytes | None:
    """Return the ONNX model with the updates of its large state written as sums on the blocked layout (NCHWc).

    Return None if it has no such state, or if values need more than :data:`ROOM` times their memory, because all terms
    of a sum exist at once.
    """
    proto = onnx.load_from_string(model)
    values = GraphValues(proto.graph)
    before = live_peak(values)
    sums = [found for name in sorted(values.outputs) if (found := _sum_of(values, name)) is not None]
    if not sums:
        return None
    _UpdateWriter(values, sums).write()
    if live_peak(GraphValues(proto.graph)) > ROOM * before:
        return None
    if all(each.domain != LAYOUT for each in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(LAYOUT, 1))
    return bytes(proto.SerializeToString(deterministic=True))


@dataclass(frozen=True)
class _Term:
    """Term of a sum: a tensor, times a number if there is one, and subtracted if ``negative``."""

    name: str
    number: str = ""
    negative: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.number or self.negative)


@dataclass(frozen=True)
class _GradientSum:
    """New state as a sum of terms.

    Attributes:
        result: name of the new state.
        shape: its shape.
        old: port of its previous value.
        scaled: terms with a number or a sign.
        plain: names of the other terms.
        inside: results of the nodes that the sum replaces.
    """

    result: str
    shape: Shape
    old: str
    scaled: tuple[_Term, ...]
    plain: tuple[str, ...]
    inside: frozenset[str]

    @property
    def onto_old(self) -> bool:
        """True if the sum adds a number times one tensor to the previous state, which can be done in its memory."""
        return self.plain == (self.old,) and len(self.scaled) == 1


def _sum_of(values: GraphValues, result: str) -> _GradientSum | None:
    """Return the sum that computes the new state ``result`` if it takes fewer passes on the blocked layout (NCHWc),
    else None.
    """
    shape, count = values.shapes.get(result, ()), values.count(result)
    is_state = result.startswith(_STATE) and values.types.get(result) == TensorProto.FLOAT
    if not (is_state and shape) or count < LEAST or count % BLOCK:
        return None
    inside = set[str]()
    terms = list(_terms(values, result, shape, inside, negative=False))
    scaled = tuple(each for each in terms if not each.is_plain)
    plain = tuple(each.name for each in terms if each.is_plain)
    found = _GradientSum(result, shape, _old(result), scaled, plain, frozenset(inside))
    products = sum(bool(each.number) for each in scaled)
    if found.onto_old:
        return found if products and not values.read_at(result) else None
    return found if products > 1 and plain else None


def _old(result: str) -> str:
    """Return the name of the input port of the state, or of rows of it, whose new value is ``result``."""
    rows = parse_rows(result)
    if rows is None:
        return result.removesuffix(REWRITTEN)
    return rows_of_port(rows.whole.removesuffix(REWRITTEN), rows.start, rows.stop)


def _terms(
    values: GraphValues, name: str, shape: Shape, inside: set[str], *, negative: bool
) -> Iterator[_Term]:
    """Yield the terms of the sum that computes ``name``, and add the results of its nodes to ``inside``.

    ``negative``: the whole sum is subtracted. A value of another shape, or with other readers, is a term of its own.
    """
    node = values.maker(name)
    own = not inside or (name not in values.outputs and len(values.read_at(name)) == 1)
    if node is not None and own and not node.domain and len({*node.input}) == len(node.input):
        if node.op_type in ("Add", "Sub") and all(values.shapes.get(each) == shape for each in node.input):
            inside.add(name)
            first, second = node.input
            yield from _terms(values, first, shape, inside, negative=negative)
            yield from _terms(values, second, shape, inside, negative=negative != (node.op_type == "Sub"))
            return
        if node.op_type == "Mul" and inside:
            for number, tensor in (node.input, node.input[::-1]):
                if values.count(number) == 1 and values.shapes.get(tensor) == shape:
                    inside.add(name)
                    yield _Term(tensor, number, negative)
                    return
    yield _Term(name, negative=negative)


class _UpdateWriter:
    """Writer of sums on the blocked layout (NCHWc), each at the position of its last node."""

    def __init__(self, values: GraphValues, sums: Sequence[_GradientSum]) -> None:
        self._values, self._graph = values, values.graph
        self._sums = {each.result: each for each in sums}
        gone = frozenset[str]().union(*(each.inside for each in sums))
        self._kept = [node for node in self._graph.node if not gone & {*node.output}]
        plain = (each.plain for each in sums if not each.onto_old)
        self._read_as_it_is = values.outputs.union(*map(read_by, self._kept), *plain)
        self._nodes: list[NodeProto] = []
        self._size = ConstantInts(self._graph, "sum_size")
        self._numbers: dict[tuple[str, bool], str] = {}
        self._kernels: dict[str, str] = {}
        self._images: dict[str, str] = {}
        self._inputs: dict[str, ValueInfoProto] = {}
        self._outputs: dict[str, ValueInfoProto] = {}

    def write(self) -> None:
        kept = {id(node) for node in self._kept}
        for node in self._graph.node:
            if node.output[0] in self._sums:
                self._sum(self._sums[node.output[0]])
            elif id(node) in kept:
                self._nodes.append(node)
        made = {name for node in self._nodes for name in node.output}
        whole = [
            each
            for each in self._graph.input
            if each.name in self._read_as_it_is or self._images.get(each.name) not in self._inputs
        ]
        replace_entries(
            (self._graph.node, self._nodes),
            (self._graph.input, [*whole, *self._inputs.values()]),
            (self._graph.output, [self._outputs.get(each.name, each) for each in self._graph.output]),
            (self._graph.value_info, [each for each in self._graph.value_info if each.name in made]),
        )

    def _sum(self, found: _GradientSum) -> None:
        if found.onto_old:
            (term,) = found.scaled
            port = self._port(found.result, found.shape)
            self._outputs[found.result] = port
            self._add(term, self._image(found.old, found.shape), found.shape, port.name)
            return
        first, *rest = found.scaled
        name = self._call("Mul", [self._image(first.name, found.shape), self._number(first)])
        for term in rest:
            name = self._add(term, name, found.shape)
        for plain in found.plain[:-1]:
            name = self._call("Add", [self._image(plain, found.shape), name])
        name = self._call("Reshape", [name, self._size(found.shape)])
        self._call("Add", [found.plain[-1], name], result=found.result)

    def _add(self, term: _Term, onto: str, shape: Shape, result: str = "") -> str:
        """Write ``onto`` plus ``term`` (a number times a tensor), both as images, and return the name of the result."""
        inputs = [self._image(term.name, shape), self._kernel(self._number(term)), "", onto]
        return self._call("Conv", inputs, LAYOUT, result, group=BLOCK, kernel_shape=[1, 1])

    def _image(self, name: str, shape: Shape) -> str:
        """Return the name of the tensor ``name`` reshaped to an image [1, C, H, W], with one block of channels.

        If only sums read a state port, the port itself gets that shape; otherwise a Reshape is written.
        """
        if name not in self._images:
            is_port = name in self._values.inputs and name.startswith(_STATE)
            if is_port and not (parse_rows(name) and name in self._read_as_it_is):
                port = self._port(name, shape)
                self._inputs[port.name], self._images[name] = port, port.name
            else:
                self._images[name] = self._call("Reshape", [name, self._size(_image_shape(shape))])
        return self._images[name]

    def _port(self, name: str, shape: Shape) -> ValueInfoProto:
        rows = name if parse_rows(name) else rows_of_port(name, 0, shape[0])
        return helper.make_tensor_value_info(rows, TensorProto.FLOAT, _image_shape(shape))

    def _number(self, term: _Term) -> str:
        """Return the name of a term's number with its sign, in the shape of an image."""
        key = (term.number, term.negative)
        if key not in self._numbers:
            self._numbers[key] = self._apply_sign(term)
        return self._numbers[key]

    def _apply_sign(self, term: _Term) -> str:
        if not term.number:
            return self._constant(np.full(1, -1 if term.negative else 1, np.float32))
        number = term.number
        if term.negative and number in self._values.constants:
            return self._constant(-np.ravel(numpy_helper.to_array(self._values.constants[number])))
        if len(self._values.shapes[number]) > AXES:
            number = self._call("Reshape", [number, self._size((1,))])
        return self._call("Neg", [number]) if term.negative else number

    def _kernel(self, number: str) -> str:
        """Return the name of a depthwise 1 x 1 kernel with ``number`` for each channel."""
        if number not in self._kernels:
            self._kernels[number] = self._call("Expand", [number, self._size((BLOCK, 1, 1, 1))])
        return self._kernels[number]

    def _constant(self, array: Any) -> str:
        name = f"sum_number{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _call(
        self, op: str, inputs: Sequence[str], domain: str = "", result: str = "", **options: Any
    ) -> str:
        result = result or f"sum{len(self._nodes)}"
        name = f"{op}_s{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [result], name=name, domain=domain, **options))
        return result


def _image_shape(shape: Shape) -> Shape:
    """Return the shape [1, C, H, W] of an image with one block of channels that has as many entries as ``shape``."""
    positions = math.prod(shape) // BLOCK
    rows = next((part for part in _PARTS if positions % part == 0), 1)
    return 1, BLOCK, rows, positions // rows
