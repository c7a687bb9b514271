"""The XNNPACK graph under construction: values, nodes, constants; permutations are kept back until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import Tensor, fx

from edgefl_export.capture.nodes import fake_value
from edgefl_export.executorch.graph import base_of
from edgefl_export.executorch.xnnpack.memory import FLOAT, NONE, workspace_bytes

_INPUT, _OUTPUT = 1, 2
_CONSTANT_ALIGNMENT = 64

DATATYPES = {
    torch.float32: xnn.XNNDatatype.xnn_datatype_fp32,
    torch.float16: xnn.XNNDatatype.xnn_datatype_fp16,
}
"""Types of values: float32 to compute with, and float16, which only conversions read and write."""


@dataclass(frozen=True)
class TensorValue:
    """Value of a delegate's graph, perhaps with a transposition that has not been executed.

    Attributes:
        id: number of the value in the graph.
        shape: sizes as stored; they may be those of another view of the node (:meth:`Builder.stored`).
        perm: order of axes: axis i of the value is axis ``perm[i]`` as stored.
    """

    id: int
    shape: tuple[int, ...]
    perm: tuple[int, ...]

    @property
    def plain(self) -> bool:
        return self.perm == tuple(range(len(self.perm)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.perm)


class Builder:
    """Builder of the graph of one delegate.

    Views become a reshape, which copies, only if an op needs the shape.

    Args:
        module: the graph.
        inside: nodes that the delegate runs.

    Attributes:
        inputs: nodes outside of the delegate that it reads, in the order of its arguments.
        nodes: nodes of XNNPACK's graph so far.
        values: values of XNNPACK's graph so far.
        reserved: value that reserves workspace (:meth:`reserve`); None if there is none.
    """

    def __init__(self, module: fx.GraphModule, inside: Set[fx.Node]) -> None:
        self.inputs: list[fx.Node] = []
        self.nodes: list[xnn.XNode] = []
        self.values: list[xnn.XNNTensorValue] = []
        self.reserved: TensorValue | None = None
        self._module, self._inside = module, inside
        self._known: dict[fx.Node, TensorValue] = {}
        self._plain: dict[TensorValue, TensorValue] = {}
        self._shaped: dict[tuple[TensorValue, tuple[int, ...]], TensorValue] = {}
        self._latest: dict[TensorValue, TensorValue] = {}
        self._outputs: dict[fx.Node, TensorValue] = {}
        self._data = bytearray()
        self._places: list[xnn.ConstantDataOffset] = [xnn.ConstantDataOffset(0, 0, None)]
        self._constants: dict[tuple[tuple[int, ...], bytes], TensorValue] = {}

    # values

    def is_known(self, node: fx.Node) -> bool:
        return node in self._known

    def value(
        self, shape: Sequence[int], constant: int = 0, dtype: torch.dtype = torch.float32
    ) -> TensorValue:
        """Add a value with these sizes to XNNPACK's graph and return it.

        Args:
            shape: sizes.
            constant: number of its data among the constants; 0 for a computed value.
            dtype: type of its entries.
        """
        sizes = tuple(int(size) for size in shape)
        made = TensorValue(len(self.values), sizes, tuple(range(len(sizes))))
        self.values.append(
            xnn.XNNTensorValue(DATATYPES[dtype], len(sizes), list(sizes), constant, NONE, 0, made.id)
        )
        return made

    def _like(self, node: fx.Node) -> TensorValue:
        value = fake_value(node)
        return self.value(value.shape, dtype=value.dtype)

    def constant(self, tensor: Tensor) -> TensorValue:
        """Return the value of a constant, stored as float32. Equal constants share a value."""
        tensor = tensor.detach().to(torch.float32).contiguous()
        data = tensor.numpy().tobytes()
        key = (tuple(tensor.shape), data)
        if key not in self._constants:
            self._data.extend(bytes(-len(self._data) % _CONSTANT_ALIGNMENT))
            self._places.append(xnn.ConstantDataOffset(len(self._data), len(data), None))
            self._data.extend(data)
            self._constants[key] = self.value(tensor.shape, len(self._places) - 1)
        return self._constants[key]

    def number(self, number: float) -> TensorValue:
        return self.constant(torch.tensor(number))

    def reshaped(self, source: TensorValue, shape: Sequence[int]) -> TensorValue:
        sizes = tuple(int(size) for size in shape)
        if sizes == source.sizes:
            return source
        key = source, sizes
        if key not in self._shaped:
            self._shaped[key] = self.value(sizes)
            self.add(
                xnn.XNNStaticReshape(len(sizes), list(sizes), self.plain(source).id, self._shaped[key].id, 0)
            )
            self._latest[source] = self._shaped[key]
        return self._shaped[key]

    def stored(self, argument: Any) -> TensorValue:
        """Return the value of a node or number with its entries in order, in the shape of the node or of a view of it."""
        return self.plain(self.raw(argument))

    def raw(self, argument: Any) -> TensorValue:
        """Return the value of a node or number as :meth:`stored`, but perhaps with a pending transposition.

        A node outside of the delegate becomes an input.
        """
        if not isinstance(argument, fx.Node):
            return self.number(float(argument))
        if argument not in self._known:
            base = base_of(argument)
            if base in self._inside:
                self._known[argument] = self.plain(self.raw(base))
            elif base.op == "get_attr":
                constant = getattr(self._module, str(base.target))
                self._known[argument] = self.constant(constant.reshape(argument.meta["val"].shape))
            else:
                self._known[argument] = self._like(argument)
                self._mark(self._known[argument], len(self.inputs), _INPUT)
                self.inputs.append(argument)
        return self._known[argument]

    def latest(self, value: TensorValue) -> TensorValue:
        """Return ``value`` in the shape of its most recent read, so that readers of that shape share one reshape."""
        while value in self._latest:
            value = self._latest[value]
        return value

    def read(self, argument: Any) -> TensorValue:
        """Return the value of a node or number in the shape of the node, perhaps with a pending transposition."""
        value = self.raw(argument)
        return self.reshaped(value, fake_value(argument).shape) if isinstance(argument, fx.Node) else value

    def id(self, argument: Any) -> int:
        """Return the number of the value of a node or number, in its shape and without a pending transposition."""
        return self.plain(self.read(argument)).id

    def plain(self, value: TensorValue) -> TensorValue:
        if value.plain:
            return value
        if value not in self._plain:
            made = self.value(value.sizes)
            self.add(xnn.XNNStaticTranspose(len(value.perm), list(value.perm), value.id, made.id, 0))
            self._plain[value] = made
        return self._plain[value]

    # results

    def output(self, node: fx.Node) -> None:
        """Declare that ``node`` is read outside of the delegate, so that its value becomes an output."""
        self._outputs[node] = self._like(node)

    def result(self, node: fx.Node, shape: Sequence[int] | None = None) -> TensorValue:
        """Return a value for the op of ``node`` to write.

        ``shape`` replaces the shape of the node; it is ignored for an output of the delegate.
        """
        wanted = self._outputs.get(node)
        if wanted is None:
            value = fake_value(node)
            wanted = self.value(value.shape if shape is None else shape, dtype=value.dtype)
        self._known[node] = wanted
        return wanted

    def is_inner(self, node: fx.Node) -> bool:
        """Return True if only the delegate reads ``node``, so that its value may have the shape of a view of it."""
        return node not in self._outputs

    def define(self, node: fx.Node, value: TensorValue) -> None:
        """Set the value of ``node`` to an existing one, perhaps with a pending transposition."""
        self._known[node] = value

    def write_output(self, node: fx.Node) -> None:
        """Copy the result of ``node`` into the value that the delegate returns for it, unless the op wrote its result
        there.
        """
        wanted, source = self._outputs[node], self._known[node]
        if source.id == wanted.id:
            return
        if source.sizes != wanted.shape:
            shape = list(wanted.shape)
            self.add(xnn.XNNStaticReshape(len(shape), shape, self.plain(source).id, wanted.id, 0))
        elif source.plain:
            self.add(xnn.XNNCopy(source.id, wanted.id, 0))
        else:
            self.add(xnn.XNNStaticTranspose(len(source.perm), list(source.perm), source.id, wanted.id, 0))
        self._known[node] = wanted

    def add(self, op: Any, low: float | None = None, high: float | None = None) -> None:
        limits = None
        if low is not None or high is not None:
            limits = xnn.OutputMinMax(
                "-inf" if low is None else float(low), "+inf" if high is None else float(high)
            )
        self.nodes.append(xnn.XNode(op, 0, limits))

    def reserve(self, count: int) -> None:
        """Make the workspace at least ``count`` bytes large by a value of that size.

        No node writes the value, and one node copies its first number into an additional output of the graph. Without
        this the workspace may grow during a call; then old and new workspace exist at once, which is the peak of the call.
        """
        room, number = self.value((count // FLOAT,)), self.value((1,))
        self.add(xnn.XNNStaticSlice(1, [0], [1], room.id, number.id, 0))
        self.reserved = number

    def _mark(self, value: TensorValue, place: int, flag: int) -> None:
        self.values[value.id].external_id = place
        self.values[value.id].flags |= flag

    def finish(self, outputs: Sequence[fx.Node]) -> tuple[xnn.XNNGraph, bytearray]:
        """Return (graph, bytes of its constants) of the delegate.

        ``outputs`` are the nodes whose results are read outside of it. External ids of values number the arguments of the
        delegate: inputs first, then outputs.
        """
        read = [self._known[node].id for node in self.inputs]
        order = {value: place for place, value in enumerate(read)}
        for place, node in enumerate(outputs):
            self._mark(self._outputs[node], len(read) + place, _OUTPUT)
            order[self._outputs[node].id] = len(read) + place
        written = [self._outputs[node].id for node in outputs]
        if self.reserved is not None:
            self._mark(self.reserved, len(order), _OUTPUT)
            order[self.reserved.id] = len(order)
            written.append(self.reserved.id)
        graph = xnn.XNNGraph(
            version="0",
            xnodes=self.nodes,
            xvalues=[xnn.XValue(value) for value in self.values],
            num_externs=len(order),
            input_ids=read,
            output_ids=written,
            constant_data=self._places,
        )
        return graph, self._data

    def workspace(self) -> int:
        """Return the bytes that XNNPACK allocates for the graph, without those of its arguments."""
        return workspace_bytes(self.nodes, self.values)


Emitter = Callable[[Builder, fx.Node], None]
"""Function that writes the op of a node into a builder."""
Condition = Callable[[fx.Node], bool]
"""Returns True for a node that an emitter accepts."""

TRANSPOSE = 1
"""XNN_FLAG_TRANSPOSE_WEIGHTS of a product, XNN_FLAG_TRANSPOSE_B of a batched one."""


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
