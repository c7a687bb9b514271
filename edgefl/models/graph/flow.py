"""Which values of a traced graph depend on the input, and between which operations exactly one of them crosses."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.graph.tracing import Traced
from edgefl.models.layers.given import Given

_aten = torch.ops.aten
# Ways to write the same weights.
_VIEWS = (
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default, _aten.mT.default),
    *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints),
)


@dataclass(frozen=True, eq=False)
class Flow:
    """The operations of a graph in order, with what each needs.

    A *step* is an operation whose value depends on the input; steps belong to one unit each, in their order. All
    others (positions, masks of ones, products of weights alone, inputs beside the first and what is made of them) are
    computed in every unit that needs them. So is the batch size, from the unit's own input.

    ``lent`` names weights that a cut may part: units on both sides of it read them. ``again``: one sample, where units after
    the first may read it once more; None: where they do, the input crosses like any tensor.
    """

    traced: Traced
    lent: frozenset[str] = frozenset()
    again: TensorSpec | None = None

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.traced.graph.nodes if node.op == "call_function")

    @cached_property
    def order(self) -> Mapping[fx.Node, int]:
        """Position of each operation."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def steps(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.nodes if node in self._carried)

    @cached_property
    def place(self) -> Mapping[fx.Node, int]:
        """Position of each step among the steps; -1 for the input."""
        return {self.traced.source: -1} | {node: position for position, node in enumerate(self.steps)}

    def is_batch(self, node: fx.Node) -> bool:
        """Whether ``node`` is the batch size."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and _plain(value) == self._batch

    def is_given(self, node: fx.Node) -> bool:
        """Whether ``node`` is an input beside the first, which every unit reads for itself."""
        call = self.traced.call(node)
        return call is not None and isinstance(self.traced.root.get_submodule(call.path), Given)

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """What ``node`` reads, and what was written in place, before it, into what it reads."""
        return [*node.all_input_nodes, *self._writes.get(node, ())]

    def upstream(self, node: fx.Node) -> frozenset[fx.Node]:
        """The step ``node``, and all that it needs and that is no step: operations, weights and constants."""
        nodes: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            reached = waiting.pop()
            nodes.add(reached)
            inputs = () if self._stands_alone(reached) else self.needs(reached)
            waiting += [inner for inner in inputs if inner not in nodes and inner not in self.place]
        return frozenset(nodes)

    @cached_property
    def state(self) -> tuple[frozenset[str], ...]:
        """For each step, the names of the root's state tensors that it uses."""
        return tuple(frozenset(self._names(self.upstream(step))) for step in self.steps)

    @cached_property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """For each step, the weights of two or more dimensions that it works with other than element by element."""
        return tuple(
            ()
            if torch.Tag.pointwise in getattr(step.target, "tags", ())
            else tuple(
                name
                for name in self._names([step, *map(_seen, step.all_input_nodes)])
                if self.dimensions[name] >= 2
            )
            for step in self.steps
        )

    @cached_property
    def dimensions(self) -> Mapping[str, int]:
        """Of each state tensor of the root."""
        return {name: tensor.dim() for name, tensor in self.traced.root.state_dict().items()}

    @cached_property
    def crossing(self) -> tuple[tuple[fx.Node, ...], ...]:
        """For each step, the values computed so far, the input included, that a later step needs."""
        last = {node: place for node, place in self.place.items() if place < 0}
        for place, step in enumerate(self.steps):
            last |= {node: place for reached in self.upstream(step) for node in self._read(reached)}
        last[self.traced.result] = len(self.steps)
        crossings: list[tuple[fx.Node, ...]] = []
        alive = [] if self.again else [self.traced.source]
        for place, step in enumerate(self.steps):
            alive = [node for node in [*alive, step] if last.get(node, -1) > place]
            crossings.append(tuple(alive))
        return tuple(crossings)

    @cached_property
    def shared(self) -> tuple[frozenset[str], ...]:
        """For each step, the state tensors used both up to it and after it; tied weights by the first of their names."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, names in enumerate(self.state):
            for name in self.tensors(names):
                first.setdefault(name, place)
                last[name] = place
        return tuple(
            frozenset(name for name in last if first[name] <= place < last[name])
            for place in range(len(self.steps))
        )

    @cached_property
    def lendable(self) -> frozenset[str]:
        """The weights, which several units may read; what a forward pass moves, such as statistics, is one unit's."""
        state = self.traced.root.state_dict(keep_vars=True)
        return self.tensors(name for name, tensor in state.items() if isinstance(tensor, nn.Parameter))

    def tensors(self, names: Iterable[str]) -> frozenset[str]:
        """The first of its names in the root for each of these state tensors."""
        return frozenset(self._firsts[name] for name in names)

    @cached_property
    def _firsts(self) -> Mapping[str, str]:
        first: dict[int, str] = {}
        state = self.traced.root.state_dict(keep_vars=True)
        return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}

    def offers(self, place: int) -> bool:
        """Whether a cut may lie after this step: one tensor of samples crosses, and no weights but those lent are needed
        on both sides."""
        crossing = self.crossing[place]
        return len(crossing) == 1 and self.is_samples(crossing[0]) and self.shared[place] <= self.lent

    def is_samples(self, node: fx.Node) -> bool:
        """Whether ``node`` is a computed tensor (batch, ...) whose other sizes do not depend on the batch."""
        value = node.meta["val"]
        if node is self.traced.source or not isinstance(value, Tensor) or value.dim() == 0:
            return False
        leading, *rest = map(_plain, value.shape)
        return leading == self._batch and not any(self._varies(size) for size in rest)

    def _varies(self, size: Any) -> bool:
        """Whether ``size`` depends on that of the batch."""
        return not isinstance(size, int) or (isinstance(self._batch, int) and size % self._batch == 0)

    def _stands_alone(self, node: fx.Node) -> bool:
        """Whether a unit has ``node`` without anything that is computed before it."""
        return self.is_batch(node) or self.is_given(node)

    def _read(self, node: fx.Node) -> list[fx.Node]:
        inputs = [] if self._stands_alone(node) else self.needs(node)
        return [inner for inner in inputs if inner in self.place]

    def _names(self, nodes: Iterable[fx.Node]) -> Iterable[str]:
        for node in nodes:
            call = self.traced.call(node)
            if node in self.traced.state:
                yield self.traced.state[node]
            elif call is not None:
                yield from (
                    f"{call.path}.{name}" for name in self.traced.root.get_submodule(call.path).state_dict()
                )

    @cached_property
    def _batch(self) -> Any:
        return _plain(self.traced.source.meta["val"].shape[0])

    @cached_property
    def _carried(self) -> frozenset[fx.Node]:
        """Operations that depend on the input, on chance, or on a tensor that such an operation is written into, and those
        that write state, which each step moves."""
        operations = {self.traced.source}
        for group in self._written:
            if not self.traced.state.keys().isdisjoint(group):
                operations.update(node for node in group if writes(node))
        while True:
            before = len(operations)
            for node in self.nodes:
                if not self._stands_alone(node) and (
                    _is_random(node) or not operations.isdisjoint(self.needs(node))
                ):
                    operations.add(node)
            for group in self._written:
                if not operations.isdisjoint(group):
                    operations.update(node for node in group if node.op == "call_function")
            if len(operations) == before:
                return frozenset(operations - {self.traced.source})

    @cached_property
    def _written(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Groups of nodes that share memory, in order, where an operation among them writes."""
        owner: dict[fx.Node, fx.Node] = {}
        for node in self.traced.graph.nodes:
            bases = [owner[base] for base in _aliased(node)]
            owner[node] = bases[0] if bases else node
            merged = set(bases[1:])
            owner |= {other: owner[node] for other, base in owner.items() if base in merged}
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node, base in owner.items():
            groups.setdefault(base, []).append(node)
        return tuple(tuple(group) for group in groups.values() if any(map(writes, group)))

    @cached_property
    def _writes(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        by_reader: dict[fx.Node, list[fx.Node]] = {}
        for group in self._written:
            writers = [node for node in group if writes(node)]
            readers = {user for node in group for user in node.users if user in self.order}
            for reader in readers:
                earlier = [writer for writer in writers if self.order[writer] < self.order[reader]]
                by_reader.setdefault(reader, []).extend(earlier)
        return by_reader


def _plain(size: int | torch.SymInt) -> Any:
    """A number, or the formula of one that the batch size decides."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _seen(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def writes(node: fx.Node) -> bool:
    """Whether the operation changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result may share."""
    if node.target is operator.getitem:
        return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    named = zip(schema.arguments, node.args, strict=False)
    return [
        argument
        for declared, argument in named
        if declared.alias_info is not None and isinstance(argument, fx.Node)
    ]


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
