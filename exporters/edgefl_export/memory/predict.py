"""Prediction of the memory that onnxruntime needs for a graph, before anything is exported or run.

Memory means anonymous memory (not backed by a file) above the idle agent, which is connected and has its engine open.
Mapped files, such as the engine's code, are not counted, because the system can drop their pages at any time.

:func:`predicted_peak` models the order in which onnxruntime executes a graph, the values that it computes in place, the
buffers of state that the device binds, and its arena. Memory besides tensors is a constant and an amount for every node.
Both are fitted to ``python -m edgefl_conformance.memory``, which compares predictions and measurements of whole rounds of
real agents. A budget must suffice for this prediction and for the bound
:func:`edgefl_export.memory.recompute.peak_bytes`, which mostly is higher.
"""

from __future__ import annotations

import bisect
import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from edgefl.contract.tensors import role_of
from edgefl_export.artifact import is_page
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import fake_value, int_argument, ints_argument
from edgefl_export.memory.usage import PRODUCTS, constants, has_many, rewritable, size, timeline, workspace
from edgefl_export.operators import POSITIVE, aten_ops

# onnxruntime's memory arena, run on sizes alone.
#
# Its rules: requests are rounded to 256 bytes and take the smallest free chunk that holds them, which is split where as
# much or 4 KiB would be left over; freed neighbours merge. A device reserves one block of the predicted size, so that all
# neighbours can merge and few addresses stay unused. onnxruntime's default doubles the arena block by block.

_ALIGN = 256
_MOST_UNUSED = 4096
_ENDLESS = 1 << 62


@dataclass
class _ArenaChunk:
    size: int
    used: bool
    before: int | None  # addresses of the neighbours
    after: int | None


class Arena:
    """Model of onnxruntime's memory arena. ``touched`` is the highest address that was ever used; addresses start at 0."""

    def __init__(self) -> None:
        self._chunks = {0: _ArenaChunk(_ENDLESS, False, None, None)}
        self._free = [(_ENDLESS, 0)]  # (size, address), ascending
        self.touched = 0

    def take(self, count: int) -> int:
        """Reserve ``count`` bytes and return their address."""
        rounded = max(_ALIGN, -(-count // _ALIGN) * _ALIGN)
        size, address = self._free.pop(bisect.bisect_left(self._free, (rounded, -1)))
        chunk = self._chunks[address]
        if size >= 2 * rounded or size - rounded >= _MOST_UNUSED:
            rest = address + rounded
            self._chunks[rest] = _ArenaChunk(size - rounded, False, address, chunk.after)
            if chunk.after is not None:
                self._chunks[chunk.after].before = rest
            chunk.size, chunk.after = rounded, rest
            bisect.insort(self._free, (size - rounded, rest))
        chunk.used = True
        self.touched = max(self.touched, address + rounded)
        return address

    def give(self, address: int) -> None:
        """Free the bytes at an address that :meth:`take` returned."""
        self._chunks[address].used = False
        after, before = self._chunks[address].after, self._chunks[address].before
        if after is not None and not self._chunks[after].used:
            self._forget(after)
            self._merge(address, after)
        if before is not None and not self._chunks[before].used:
            self._forget(before)
            self._merge(before, address)
            address = before
        bisect.insort(self._free, (self._chunks[address].size, address))

    def _forget(self, address: int) -> None:
        """Remove the free chunk at ``address`` from the list of free chunks."""
        del self._free[bisect.bisect_left(self._free, (self._chunks[address].size, address))]

    def _merge(self, left: int, right: int) -> None:
        gone = self._chunks.pop(right)
        self._chunks[left].size += gone.size
        self._chunks[left].after = gone.after
        if gone.after is not None:
            self._chunks[gone.after].before = left


NODE_BYTES = 5100
"""Bytes for each node of a loaded graph: the parsed model and onnxruntime's session."""
ROUND_BYTES = 2.8e6
"""Bytes of a round besides the graph: leftovers of other graphs, the store, decompression, the assembly of a batch."""
SEGMENT_BYTES = 0.95e6
"""Bytes of each segment but the first: its session and its small pages."""
ARENA_SHARE = 0.05
"""Addition as a share of the arena: onnxruntime's table of blocks, buffers of kernels, and blocks at other addresses."""

ARENA_BYTES = 512 << 10
"""Bytes that are reserved in addition, because an arena that grows beyond its first block has gaps that stay unused."""

_aten = torch.ops.aten
# Those that onnxruntime replaces by a new node, which then counts as later than all others.
_REPLACED = frozenset({_aten.mm.default, _aten.addmm.default})
_SUM = _aten.add.Tensor
# Those that onnxruntime's kernels compute in place; its arithmetic does not, nor do Exp, Log and their like.
_IN_PLACE = aten_ops("relu sigmoid tanh softplus leaky_relu elu hardsigmoid clamp _softmax _log_softmax") | {
    POSITIVE
}
# onnxruntime copies the places that these write to.
_SCATTERED = aten_ops("scatter.src scatter.value scatter_add scatter_reduce.two index_put _unsafe_index_put")
_CELLS = "edgefl"
"""Namespace of the operators of recurrent layers (:mod:`edgefl.models.layers.cells`)."""
# What onnxruntime's convolution copies windows into, for each thread: 128 x 128 numbers.
_FLOAT, _CONVOLUTION_SLICE = 4, 4 * 128 * 128
# State moves between two sets of buffers: from the second step on, both exist.
_STEPS = 2


def predicted_peak(*steps: LoweredGraph) -> int:
    """Return the predicted peak of anonymous memory above the idle agent, in bytes, for a round that repeats ``steps``.

    ``steps`` is one graph, or the segments of a graph in order. Only one segment at a time holds its values and the pages
    that it reads and writes.
    """
    runs = [_ArenaRun(each) for each in steps]
    nodes = NODE_BYTES * sum(len(run.calls) for run in runs)
    given = {name: count for run in runs for name, count in run.given.items()}
    bound = sum(given.values()) + sum(run.own for run in runs) + SEGMENT_BYTES * (len(runs) - 1)
    turn = max(run.pages + (1 + ARENA_SHARE) * run.arena_bytes() + run.places for run in runs)
    copied = max((run.largest for run in runs), default=0)
    return int(ROUND_BYTES + nodes + bound + turn + copied)


def predicted_arena(lowered: LoweredGraph) -> int:
    """Return the bytes that a device should reserve for onnxruntime's arena: the predicted size with a margin.

    0 if the graph needs no arena.
    """
    found = _ArenaRun(lowered).arena_bytes()
    return found and int((1 + ARENA_SHARE) * found) + ARENA_BYTES


class _ArenaRun:
    """Simulation of the memory that runs of a graph use in onnxruntime's order of execution.

    Attributes:
        calls: nodes that compute.
        largest: bytes of the largest new state.
        places: bytes of the largest copy of positions by a scatter.
        given: bytes of each input by name, without pages.
        own: bytes outside the arena that the graph itself holds: constants, and buffers of outputs.
        pages: bytes of the pages that it reads and writes.
    """

    def __init__(self, lowered: LoweredGraph) -> None:
        line = timeline(lowered.module)
        self.calls = [node for node in line.nodes if node.op == "call_function"]
        self._position = line.position
        result = next(node for node in line.nodes if node.op == "output")
        returned: tuple[fx.Node, ...] = result.args[0]  # type: ignore[assignment]
        named = list(zip(lowered.outputs, returned, strict=True))
        self._state = {
            node for name, node in named if role_of(name) == "state" and node.op == "call_function"
        }
        in_place_names = rewritable(lowered)
        in_place = {node for name, node in named if name in in_place_names}
        self._outputs = {node for _, node in named}
        pages = {node for name, node in named if is_page(name)}
        self._products = _through_transposes(self.calls)
        self._owner = {node: self._root(line.owner, node) for node in line.nodes}
        fixed = constants(line)
        read = dict(zip(lowered.inputs, (n for n in line.nodes if n.op == "placeholder"), strict=True))
        self.largest = max(map(size, self._state), default=0)
        """Bytes of the largest tensor of the new state: a checkpoint copies one after the other."""
        # Bound buffers and copies of inputs: the graph has them from its beginning to its end.
        second = self._state - in_place
        bound = second | (self._outputs - self._state - pages)
        left = sum(size(node) for _, node in named if node in bound or node.op != "call_function")
        self.places = max((_place_bytes(node) for node in self.calls), default=0)
        """Bytes of the largest copy of places that a scatter makes."""
        self.given = {name: size(node) for name, node in read.items() if not is_page(name)}
        # A view of a constant, such as the zeros that an embedding's gradient is added to, takes no memory.
        self.own = left + sum(size(node) for node in fixed if line.owner[node] is node)
        self.pages = sum(size(node) for name, node in [*read.items(), *named] if is_page(name))
        self._elsewhere = self._outputs | fixed

    def _root(self, owner: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
        """Return the node that owns the memory of ``node``; a transpose that a product absorbs owns none."""
        while True:
            above = owner[node] if owner[node] is not node else self._products.get(node, node)
            if above is node or node in self._outputs:
                return node
            node = above

    def arena_bytes(self) -> int:
        """Return the bytes of the arena that were used after :data:`_STEPS` runs."""
        order, arena = self._order(), Arena()
        ends = self._ends(order)
        for _ in range(_STEPS):
            addresses: dict[fx.Node, int] = {}
            for node in order:
                self._execute(node, addresses, ends, arena)
            for address in addresses.values():
                arena.give(address)
        return arena.touched

    def _execute(
        self, node: fx.Node, held: dict[fx.Node, int], ends: dict[fx.Node, fx.Node], arena: Arena
    ) -> None:
        reads = list(dict.fromkeys(self._owner[value] for value in node.all_input_nodes))
        dying = [value for value in reads if ends.get(value) is node and value in held]
        for made in self._made(node):
            same = [value for value in dying if size(value) == size(made) and _in_place(made, value)]
            if same:
                held[made] = held.pop(same[0])
                dying.remove(same[0])
            else:
                held[made] = arena.take(size(made))
        for address in [arena.take(count) for count in _buffers(node)]:
            arena.give(address)
        unread = [node] if node not in ends and node in held and node not in self._outputs else []
        for value in [*dying, *unread]:
            arena.give(held.pop(value))

    def _made(self, node: fx.Node) -> list[fx.Node]:
        """Return the values in the arena that ``node`` computes: its results if it has several, itself, or none."""
        if has_many(node):
            return [part for part in node.users if self._in_arena(part)]
        return [node] if self._in_arena(node) and node.target is not operator.getitem else []

    def _in_arena(self, node: fx.Node) -> bool:
        return self._owner[node] is node and node not in self._elsewhere and size(node) > 0

    def _ends(self, order: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the last reader of each value that is no output, by value; its memory is freed after that node."""
        ends = {self._owner[value]: node for node in order for value in node.all_input_nodes}
        return {value: node for value, node in ends.items() if value not in self._outputs}

    def _order(self) -> list[fx.Node]:
        """Return the nodes in onnxruntime's order of execution.

        It is depth first from the nodes without readers, the last of them first; among inputs, the latest first.
        """
        leaves = [node for node in self.calls if not any(user.op == "call_function" for user in node.users)]
        stack = [(node, False) for node in leaves]
        seen: set[fx.Node] = set()
        order: list[fx.Node] = []
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                inputs = {v for v in node.all_input_nodes if v.op == "call_function" and v not in seen}
                stack += [(value, False) for value in sorted(inputs, key=self._rank)]
        return order

    def _rank(self, node: fx.Node) -> int:
        """Return the position of a node in onnxruntime's list, where products and sums with one come after all others."""
        node = self._source(node)
        summed = [self._source(value) for value in node.all_input_nodes] if node.target is _SUM else []
        later = any(value.target in _REPLACED for value in (node, *summed))
        return self._position[node] + (len(self._position) if later else 0)

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the operand if ``node`` is a transpose that a product absorbs, else ``node``."""
        while node in self._products:
            node = self._products[node]
        return node


def _in_place(node: fx.Node, value: fx.Node) -> bool:
    """Return True if onnxruntime computes ``node`` in the memory of its operand ``value``.

    A sum with a product counts, because it becomes part of that product.
    """
    return node.target in _IN_PLACE or (node.target is _SUM and value.target in _REPLACED)


def _through_transposes(calls: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return a dictionary of the transposes that become a flag of a product, each with its operand."""
    transposes: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if not _is_transpose(node):
            continue
        source = node.all_input_nodes[0]
        behind = source.target in PRODUCTS or _is_transpose(source)
        if behind or all(user.target in PRODUCTS or _is_transpose(user) for user in node.users):
            transposes[node] = source
    return transposes


def _buffers(node: fx.Node) -> list[int]:
    """Return the bytes of each temporary block of the kernel of ``node``, for one thread.

    A convolution copies the windows of its input. It copies slices of one size if it has at most as many filters as output
    positions, else a whole image; a 1 x 1 convolution copies nothing. A transposed convolution computes the windows of its
    output for a whole image and group and then adds them up. A recurrent layer keeps all of its results, also those that
    no node reads.
    """
    if has_many(node) and getattr(node.target, "namespace", "") == _CELLS:
        read = {user.args[1] for user in node.users}
        return [each.nbytes for index, each in enumerate(node.meta["val"]) if index not in read]
    if node.target is not _aten.convolution.default:
        return [workspace(node) // 2] * 2 if workspace(node) else []
    weight, stride, padding = node.args[1], ints_argument(node, 3), ints_argument(node, 4)
    filters, depth, *window = fake_value(weight).shape
    if node.args[6]:  # transposed: its weight counts the channels of the input first
        positions = math.prod(fake_value(node.args[0]).shape[2:])
        return [_FLOAT * depth * math.prod(window) * positions]
    if {*window, *stride} == {1} and not any(padding):
        return []
    places, groups = math.prod(node.meta["val"].shape[2:]), int_argument(node, 8)
    whole = places * depth * math.prod(window)
    return [_FLOAT * whole if filters // groups > places else _CONVOLUTION_SLICE]


def _place_bytes(node: fx.Node) -> int:
    """Return the bytes of the integer positions that a scatter copies outside of the arena; 0 for other nodes."""
    read = node.all_input_nodes if node.target in _SCATTERED else []
    return sum(size(value) for value in read if value.meta["val"].dtype == torch.int64)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is _aten.permute.default and node.meta["val"].ndim == 2
