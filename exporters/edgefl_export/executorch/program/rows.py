"""Updates of large state row by row: values between the old and the new state stay in a cache.

As one graph has it, each op of ``m <- mu m + g + d w; w <- w - lr m`` goes through memory: fifteen times for a weight that
no cache holds. Here a block of rows goes through all of them, its gradient's product included, before the next begins.
The blocks are ports of the program, named by their rows (:mod:`edgefl.wire.bundle.graphs`): they lie in the memory of the
whole. :mod:`edgefl_export.onnx.rows` is the same for ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.wire.bundle.graphs import rows_of_port
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import fake_value, node_argument, results
from edgefl_export.executorch.xnnpack.region import supported
from edgefl_export.memory.usage import is_pointwise

_aten = torch.ops.aten

BLOCK_BYTES = 1 << 19
"""Of a tensor at a time: three of them fit into a processor's own cache of 2 MB. CNN's step takes 52.6 ms, 55.9 with blocks
of 1 MB, 62.2 whole (by turns, Intel Xeon)."""
LARGE_BYTES = 1 << 21
"""From here on tensors are divided."""

Shape = tuple[int, ...]


def has_large_state(lowered: LoweredGraph) -> bool:
    """Return True if there is state to divide."""
    return bool(_large(lowered))


def by_rows(lowered: LoweredGraph, module: fx.GraphModule) -> LoweredGraph | None:
    """Divide the updates of large state in ``module`` into blocks of rows, in place, and return its new ports.

    ``module`` is ``lowered`` in kernel ops. None if there is nothing to divide.
    """
    updates = [each for shape in sorted(_large(lowered)) for each in _updates(lowered, module, shape)]
    if not updates:
        return None
    return _Divided(lowered, module).written(updates)


def _large(lowered: LoweredGraph) -> set[Shape]:
    """Return the shapes of large state that has a new value."""
    return {
        spec.shape
        for name, spec in lowered.outputs.items()
        if role_of(name) == "state"
        and lowered.inputs.get(name) == spec
        and spec.dtype == torch.float32
        and len(spec.shape) == 2
        and spec.shape[0] > 1
        and 4 * math.prod(spec.shape) >= LARGE_BYTES
    }


@dataclass(frozen=True)
class _StateUpdate:
    """Nodes that make new state of one shape entry by entry, in order, and the products that only they read."""

    shape: Shape
    nodes: tuple[fx.Node, ...]
    products: frozenset[fx.Node]


def _updates(lowered: LoweredGraph, module: fx.GraphModule, shape: Shape) -> Iterator[_StateUpdate]:
    """Return the updates of each tensor whose gradient is a product; one made whole in another way gains nothing."""
    made = dict(zip(lowered.outputs, results(module.graph), strict=True))
    ends = {node for name, node in made.items() if role_of(name) == "state" and name in lowered.inputs}
    kept = {node for name, node in made.items() if node not in ends}
    chosen: dict[fx.Node, None] = {}
    for node in reversed(module.graph.nodes):
        if node in kept or not _is_entrywise(node, shape):
            continue
        readers = [user for user in node.users if user.op != "output"]
        if (readers or node in ends) and all(user in chosen for user in readers):
            chosen[node] = None
    for nodes in _connected([*chosen][::-1]):
        read = {each for node in nodes for each in node.all_input_nodes}
        products = frozenset(each for each in read if _is_product_for(each, nodes, shape))
        if products and any(each.op == "placeholder" and fake_value(each).shape == shape for each in read):
            yield _StateUpdate(shape, nodes, products)


def _is_entrywise(node: fx.Node, shape: Shape) -> bool:
    return (
        node.op == "call_function"
        and is_pointwise(node)
        and supported(node)
        and tuple(fake_value(node).shape) == shape
    )


def _is_product_for(node: fx.Node, nodes: Sequence[fx.Node], shape: Shape) -> bool:
    is_product = node.target is _aten.mm.default and tuple(fake_value(node).shape) == shape
    return is_product and all(user in nodes for user in node.users)


def _connected(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Return the nodes in groups, in order: nodes of a group read results of others of it."""
    groups: list[tuple[fx.Node, ...]] = []
    for node in nodes:
        mine = [each for each in groups if any(read in each for read in node.all_input_nodes)]
        joined = tuple(each for group in mine for each in group)
        groups = [each for each in groups if each not in mine] + [(*joined, node)]
    return groups


class _Divided:
    """Writer of the updates of a graph, behind all else."""

    def __init__(self, lowered: LoweredGraph, module: fx.GraphModule) -> None:
        self._lowered, self._module = lowered, module
        self._graph = module.graph
        self._end = self._graph.output_node()
        self._ports = dict(zip(self._graph.find_nodes(op="placeholder"), lowered.inputs, strict=True))
        self._rows: dict[str, fx.Node] = {}
        self._made: dict[fx.Node, list[fx.Node]] = {}

    def written(self, updates: Sequence[_StateUpdate]) -> LoweredGraph:
        for update in updates:
            for start, stop in _blocks(update.shape):
                self._block(update, start, stop)
        outputs = self._outputs()
        self._graph.eliminate_dead_code()
        return replace(self._lowered, module=self._module, inputs=self._inputs(), outputs=outputs)

    def _block(self, update: _StateUpdate, start: int, stop: int) -> None:
        rows: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(self._end):
            for node in update.nodes:
                for read in node.all_input_nodes:
                    if read not in rows:
                        rows[read] = self._part(read, update, start, stop)
                rows[node] = self._copied(node, rows, start, stop)
                self._made.setdefault(node, []).append(rows[node])

    def _part(self, node: fx.Node, update: _StateUpdate, start: int, stop: int) -> fx.Node:
        """Return the rows of a value that the update reads; the node itself if it has one row for all."""
        shape = fake_value(node).shape
        if len(shape) < len(update.shape) or shape[0] == 1:
            return node
        if node in update.products:
            left, right = node_argument(node, 0), node_argument(node, 1)
            made = self._graph.call_function(_aten.mm.default, (self._sliced(left, start, stop), right))
            made.meta = node.meta | {"val": _of_rows(node, start, stop)}
            return made
        if node in self._ports and role_of(self._ports[node]) == "state":
            return self._port(node, start, stop)
        return self._sliced(node, start, stop)

    def _copied(self, node: fx.Node, rows: Mapping[fx.Node, fx.Node], start: int, stop: int) -> fx.Node:
        copy = self._graph.node_copy(node, lambda read: rows.get(read, read))
        copy.meta["val"] = _of_rows(node, start, stop)
        return copy

    def _sliced(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        made = self._graph.call_function(_aten.slice.Tensor, (node, 0, start, stop))
        made.meta["val"] = _of_rows(node, start, stop)
        return made

    def _port(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        name = rows_of_port(self._ports[node], start, stop)
        if name not in self._rows:
            last = self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):
                made = self._graph.placeholder(f"rows_{len(self._rows)}")
            made.meta["val"] = _of_rows(node, start, stop)
            self._rows[name] = made
        return self._rows[name]

    def _outputs(self) -> dict[str, TensorSpec]:
        """Return the ports of the results: the blocks, one behind the other, for each whole."""
        returned: dict[str, fx.Node] = {}
        for (name, spec), node in zip(self._lowered.outputs.items(), results(self._graph), strict=True):
            if node in self._made:
                names = [rows_of_port(name, *rows) for rows in _blocks(spec.shape)]
                returned |= zip(names, self._made[node], strict=True)
            else:
                returned[name] = node
        self._end.args = (tuple(returned.values()),)
        return {name: _spec(node) for name, node in returned.items()}

    def _inputs(self) -> dict[str, TensorSpec]:
        """Return the read ports, without those of which only rows are read."""
        inputs: dict[str, TensorSpec] = {}
        names = self._ports | {node: name for name, node in self._rows.items()}
        divided = {self._ports[node] for node in self._ports if self._is_divided(node)}
        for node in self._graph.find_nodes(op="placeholder"):
            if not node.users and names[node] in divided:
                self._graph.erase_node(node)
            else:
                inputs[names[node]] = _spec(node)
        return inputs

    def _is_divided(self, port: fx.Node) -> bool:
        return any(each.startswith(f"{self._ports[port]}[") for each in self._rows)


def _of_rows(node: fx.Node, start: int, stop: int) -> torch.Tensor:
    value = fake_value(node)
    return value.new_empty((stop - start, *value.shape[1:]))


def _spec(node: fx.Node) -> TensorSpec:
    value = fake_value(node)
    return TensorSpec(tuple(value.shape), value.dtype)


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
    return ((start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
