"""Products of matrices with only ops by entry between them, as convolutions of one position on the blocked layout.

A matrix of T rows and C columns is an image of T positions and C channels on it::

    x [T, C] -> as [1, 1, T, C], channels last -> ReorderInput -> [C/b][T][b]

Entry by entry, the order of the numbers does not matter: values between two products keep their shape and their nodes, and
only the products use that their numbers are in another order. In the layout of a kernel, [O/b][I/b][b][b], such an image of
O channels and I positions is a kernel of O x I. So the three products of a layer bring few numbers there or back::

    y = x W^T           -> Conv(x, kernel W).                             W [O, I] is an image of I positions.
    dL/dx = dL/dy W     -> Conv(dL/dy, kernel W^T).                       W is one of O positions.
    dL/dW = dL/dy^T x   -> Conv(x with rows as channels, kernel dL/dy).   dL/dy is read as it lies.

What a layer of a transformer keeps between its two products, four times as wide as what goes in and comes out, is the case
for which this pays; products alone gain less than the layout costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from edgefl_export.onnx.blocked.layout import BLOCK
from edgefl_export.onnx.values import (
    BY_ENTRY,
    LAYOUT,
    ConstantInts,
    GraphValues,
    Shape,
    attributes,
    read_by,
    replace_entries,
)

_LEAST = 1 << 25
"""Multiplications of a product; a smaller one takes as long as its operands take to be brought here."""
_PRODUCTS = 3
"""Of a region: fewer are no layer that is trained."""
_MATRIX = 2


@dataclass(frozen=True)
class MatrixProduct:
    """Product ``x @ y`` of [T, I] and [I, O], plus ``bias`` [O] if it has one entry.

    ``of`` is the matrix whose transpose is ``x``, for a weight gradient; else "".
    """

    x: str
    y: str
    bias: tuple[str, ...] = ()
    of: str = ""


def with_products(graph: GraphProto) -> int:
    """Write the products of ``graph`` on the blocked layout (NCHWc), in place, and return their number."""
    values = GraphValues(graph)
    products = {
        node.output[0]: product for node in graph.node if (product := _product(values, node)) is not None
    }
    inside = set[str]()
    for name, product in products.items():
        if name not in inside and not product.of:
            inside |= _region(values, products, name)
    if not inside:
        return 0
    writer = _ProductWriter(values, products, inside)
    nodes = [each for node in graph.node for each in writer.written(node)]
    read = values.outputs.union(*map(read_by, nodes))
    replace_entries((graph.node, [node for node in nodes if read & {*node.output}]))
    return writer.count


def _product(values: GraphValues, node: NodeProto) -> MatrixProduct | None:
    """Return the product that a node computes if it is large and its sizes are multiples of a block, else None."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    x, y, *bias = node.input
    shapes = [values.shapes.get(name, ()) for name in (x, y)]
    if any(len(shape) != _MATRIX for shape in shapes) or values.types.get(x) != TensorProto.FLOAT:
        return None
    (rows, inner), columns = shapes[0], shapes[1][1]
    turned = _find_transposed(values, x)
    channels = (rows, inner, columns) if turned is not None else (inner, columns)
    if any(size % BLOCK for size in channels) or rows * inner * columns < _LEAST:
        return None
    if node.op_type == "Gemm":
        options = attributes(node)
        plain = (options.get("alpha", 1.0), options.get("beta", 1.0)) == (1.0, 1.0)
        turns = options.get("transA", 0) or options.get("transB", 0)
        if not plain or turns or any(values.shapes.get(name) != (columns,) for name in bias):
            return None
    if turned is not None and bias:
        return None
    return MatrixProduct(x, y, tuple(bias), of=turned or "")


def _find_transposed(values: GraphValues, matrix: str) -> str | None:
    """Return the matrix whose transpose is the value ``matrix``, or None if it is no transpose."""
    node = values.maker(matrix, "Transpose")
    return node.input[0] if node is not None and [*attributes(node)["perm"]] == [1, 0] else None


def _region(values: GraphValues, products: Mapping[str, MatrixProduct], start: str) -> set[str]:
    """Return the names of the values that are connected with ``start`` by element-wise ops and reshapes.

    Return an empty set if another node than these, products and sums over rows computes or reads one of them.
    """
    channels, total = values.shapes[start][-1], values.count(start)
    found, waiting, ends = set[str](), [start], set[str]()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        *rows, last = values.shapes.get(name, (0,))
        ported = name in values.outputs or name in values.inputs
        if ported or not rows or last != channels or values.count(name) != total:
            return set()
        found.add(name)
        for node in (values.maker(name), *values.read_at(name)):
            joined = _connected_values(values, products, node, name) if node is not None else None
            if node is None or joined is None:
                return set()
            waiting += joined
            ends |= products.keys() & {*node.output}
    return found if len(ends) >= _PRODUCTS else set()


def _connected_values(
    values: GraphValues, products: Mapping[str, MatrixProduct], node: NodeProto, name: str
) -> Sequence[str] | None:
    """Return the names of the values that a maker or reader of ``name`` connects with it, or None if the node needs
    another layout.

    ``products`` has the products that can be on the blocked layout (NCHWc), by name of the result.
    """
    result = node.output[0]
    product = products.get(result)
    if product is not None:
        images = {product.of, product.y} if product.of else {product.x, result}
        kernels = product.bias if product.of else (product.y, *product.bias)
        return () if name in images and name not in kernels else None
    if node.domain:
        return None
    if node.op_type == "Transpose" and name != result:
        turned = [products.get(each.output[0]) for each in values.read_at(result)]
        fits = all(each is not None and each.of == name and each.y != result for each in turned)
        return () if fits and result not in values.outputs else None
    if node.op_type == "Reshape":
        taken = name != result and values.is_waited_for(result)
        return () if taken else (result, node.input[0])
    if node.op_type in BY_ENTRY:
        return (result, *(each for each in node.input if values.count(each) != 1))
    fits = values.types.get(name) == TensorProto.FLOAT and values.shapes.get(result) is not None
    return () if fits and name == _find_summed(values, node) else None


def _find_summed(values: GraphValues, node: NodeProto) -> str:
    """Return the name of the value whose rows ``node`` sums, by a sum or a product with ones; "" for other nodes."""
    if node.op_type == "MatMul" and not node.domain:
        ones = values.maker(node.input[0], "Expand")
        number = values.constants.get(ones.input[0]) if ones is not None else None
        shapes = [values.shapes.get(name, ()) for name in node.input]
        whole = [*map(len, shapes)] == [_MATRIX, _MATRIX] and shapes[0][0] == 1
        return node.input[1] if whole and number is not None and _is_one(number) else ""
    if node.op_type != "ReduceSum" or len(node.input) == 1:
        return ""
    rank, axes = len(values.shapes.get(node.input[0], ())), values.whole(node.input[1])
    rows = axes is not None and rank and sorted(axis % rank for axis in axes) == list(range(rank - 1))
    return node.input[0] if rows else ""


def _is_one(number: TensorProto) -> bool:
    return numpy_helper.to_array(number).tolist() in (1.0, [1.0], [[1.0]])


class _ProductWriter:
    """Writer of matrix products on the blocked layout (channels in blocks of a register's size).

    ``count`` is the number of products so far.
    """

    def __init__(self, values: GraphValues, products: Mapping[str, MatrixProduct], inside: Set[str]) -> None:
        self.count = self._made = 0
        self._values, self._products, self._inside = values, products, inside
        self._sizes = ConstantInts(values.graph, "product_size")
        self._known: dict[tuple[str, str], str] = {}
        self._new: list[NodeProto] = []

    def written(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the nodes that replace ``node``."""
        result = node.output[0]
        product = self._products.get(result)
        self._new = []
        if product is not None and self._inside & {result, product.x, product.of, product.y}:
            self.count += 1
            if product.of:
                self._weight_gradient(product, result)
            else:
                self._plain(product, result)
        elif (summed := _find_summed(self._values, node)) in self._inside:
            self._sum(summed, result)
        else:
            self._new = [node]
        yield from self._new

    def _plain(self, product: MatrixProduct, result: str) -> None:
        (rows, inner), columns = self._values.shapes[product.x], self._values.shapes[product.y][1]
        image = self._image(product.x, (1, inner, 1, rows))
        made = self._call("Conv", [image, self._kernel(product.y), *product.bias], kernel_shape=[1, 1])
        if result not in self._inside:
            made = self._call("ReorderOutput", [made], channels=columns, channels_last=1)
        self._reshape(made, (rows, columns), result)

    def _kernel(self, matrix: str) -> str:
        """Return the name of the matrix [I, O] as the kernel of a 1 x 1 convolution on the blocked layout (NCHWc);
        write the conversion if needed.
        """
        turned = _find_transposed(self._values, matrix)
        key = ("kernel", matrix)
        if key not in self._known:
            inner, out = self._values.shapes[matrix]
            if turned is None:
                made = self._reorder(matrix, (1, 1, inner, out), channels_last=1)
            else:
                made = self._reorder(turned, (1, out, 1, inner))
            self._known[key] = self._reshape(made, (out, inner, 1, 1))
        return self._known[key]

    def _weight_gradient(self, product: MatrixProduct, result: str) -> None:
        """Write the weight gradient ``result`` [N, M]: the product of ``product.of`` [T, N], transposed, and
        ``product.y`` [T, M].

        One factor becomes the kernel of a 1 x 1 convolution without a conversion. The other becomes its image, whose
        channels are the T rows.
        """
        left, right = product.of, product.y
        (rows, columns), (_, others) = self._values.shapes[left], self._values.shapes[right]
        last: dict[str, Any] = {}
        if left in self._inside:
            kernel, image, out, positions = left, self._outside(right), columns, others
        else:
            kernel, image, out, positions = right, left, others, columns
            last = {"channels_last": 1}
        made = self._call(
            "Conv",
            [
                self._reorder(image, (1, rows, 1, positions)),
                self._reshape(self._image(kernel, (1, out, 1, rows)), (out, rows, 1, 1)),
            ],
            kernel_shape=[1, 1],
        )
        plain = self._call("ReorderOutput", [made], channels=out, **last)
        self._reshape(plain, (columns, others), result)

    def _sum(self, name: str, result: str) -> None:
        """Write ``result``, the sum of all rows of the value ``name``, as their number times the mean of each channel."""
        *rows, channels = self._values.shapes[name]
        count = math.prod(rows)
        number = f"product_rows{count}"
        if number not in self._values.shapes:
            self._values.shapes[number] = ()
            self._values.graph.initializer.append(helper.make_tensor(number, TensorProto.FLOAT, (), [count]))
        mean = self._call("GlobalAveragePool", [self._reshape(name, (1, channels, 1, count))])
        total = self._call("Mul", [mean, number], domain="")
        self._reshape(total, self._values.shapes[result], result)

    def _image(self, name: str, shape: Shape) -> str:
        """Return the name of the matrix ``name`` as an image of ``shape`` [1, C, 1, T] on the blocked layout (NCHWc);
        write the conversion if needed.
        """
        if name in self._inside:
            return self._reshape(name, shape)
        _, channels, _, rows = shape
        return self._reorder(name, (1, 1, rows, channels), channels_last=1)

    def _outside(self, name: str) -> str:
        """Return the name of the matrix in row order; write the conversion if it is on the blocked layout (NCHWc)."""
        if name not in self._inside:
            return name
        key = ("outside", name)
        if key not in self._known:
            rows, channels = self._values.shapes[name]
            plain = self._call(
                "ReorderOutput",
                [self._reshape(name, (1, channels, 1, rows))],
                channels=channels,
                channels_last=1,
            )
            self._known[key] = self._reshape(plain, (rows, channels))
        return self._known[key]

    def _reorder(self, name: str, shape: Shape, **options: Any) -> str:
        key = (f"{shape}", name)
        if key not in self._known:
            self._known[key] = self._call("ReorderInput", [self._reshape(name, shape)], **options)
        return self._known[key]

    def _reshape(self, name: str, shape: Shape, result: str = "") -> str:
        return self._call("Reshape", [name, self._sizes(shape)], result, domain="")

    def _call(
        self, op: str, inputs: Sequence[str], result: str = "", domain: str = LAYOUT, **options: Any
    ) -> str:
        self._made += 1
        made = result or f"product{self._made}"
        self._new.append(helper.make_node(op, inputs, [made], name=f"{op}_{made}", domain=domain, **options))
        return made
