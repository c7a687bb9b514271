"""Dataflow of a traced graph: the values and weights that each operation needs, and the values live between operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.inputs import InputLayer
from edgefl.models.partition.normalize import is_random, path_of, random_nodes, writes
from edgefl.models.partition.tracer import TracedGraph
from edgefl.models.user_code import source_of

_aten = torch.ops.aten
# Operations that present the same weights in another shape or order.
_VIEWS = (
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default, _aten.mT.default),
    *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints),
)


@dataclass(frozen=True, eq=False)
class Dataflow:
    """Operations of a graph in order, with the values and weights that each of them needs.

    A *step* is an operation that depends on the input. Each step belongs to one unit. All other operations (positions,
    masks of ones, products of weights alone, additional inputs and what is computed from them) are repeated in every
    unit that needs them. Every unit reads the batch size from its own input.

    Attributes:
        graph: Traced graph.
        shared_weights: Names of weights that units on both sides of a cut may read.
        reread_input: One sample of the input, if units after the first may read the input again. None: the input must
            cross each cut like any other tensor.
    """

    graph: TracedGraph
    shared_weights: frozenset[str] = frozenset()
    reread_input: TensorSpec | None = None

    @cached_property
    def operations(self) -> tuple[fx.Node, ...]:
        """All operations of the graph in order, without placeholders and output."""
        return tuple(node for node in self.graph.graph.nodes if node.op == "call_function")

    @cached_property
    def steps(self) -> tuple[fx.Node, ...]:
        """Steps (operations that depend on the input), in order."""
        return tuple(node for node in self.operations if node in self._input_dependent)

    @cached_property
    def step_index(self) -> Mapping[fx.Node, int]:
        """Index of each step in :attr:`steps`; -1 for the input."""
        return {self.graph.source: -1} | {node: position for position, node in enumerate(self.steps)}

    def is_batch_size(self, node: fx.Node) -> bool:
        """Return True if the value of ``node`` is the size of the batch, an integer, and no tensor."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and _size(value) == self._batch

    def is_extra_input(self, node: fx.Node) -> bool:
        """Return True if ``node`` reads an additional input, which every unit (stage of the model) reads itself."""
        call = self.graph.leaf_call(node)
        return call is not None and isinstance(self.graph.root.get_submodule(call.path), InputLayer)

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that ``node`` depends on.

        They are the nodes that it reads, and the earlier operations that wrote in place to the memory that it reads.
        """
        return [*node.all_input_nodes, *self._earlier_writes.get(node, ())]

    def dependencies(self, step: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes that a unit (stage of the model) needs to compute ``step``, apart from the results of
        earlier steps.

        They are ``step`` itself, and operations independent of the input, weights and constants that it needs.
        """
        nodes: set[fx.Node] = set()
        waiting = [step]
        while waiting:
            reached = waiting.pop()
            nodes.add(reached)
            waiting += [
                inner
                for inner in self._computed_inputs(reached)
                if inner not in nodes and inner not in self.step_index
            ]
        return frozenset(nodes)

    @cached_property
    def weights_used(self) -> tuple[frozenset[str], ...]:
        """Names of the state tensors that each step (operation that depends on the input) uses, by index of the step."""
        return tuple(frozenset(self._state_names(self.dependencies(step))) for step in self.steps)

    @cached_property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Names of the kernels that each step (operation that depends on the input) uses, by index of the step.

        A kernel is a weight of two or more dimensions that is not only used elementwise.
        """
        dimensions = {name: tensor.dim() for name, tensor in self.graph.root.state_dict().items()}
        return tuple(
            ()
            if torch.Tag.pointwise in getattr(step.target, "tags", ())
            else tuple(
                name
                for name in self._state_names([step, *map(_base_of_view, step.all_input_nodes)])
                if dimensions[name] >= 2
            )
            for step in self.steps
        )

    @cached_property
    def live_values(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Values that are live after each step (operation that depends on the input), by index of the step.

        A value is live if a later step needs it: the input, or an earlier result. If units (stages of the model) may
        read the input again (:attr:`reread_input`), the input is left out.
        """
        last = {node: index for node, index in self.step_index.items() if index < 0}
        for index, step in enumerate(self.steps):
            for reached in self.dependencies(step):
                last |= {n: index for n in self._computed_inputs(reached) if n in self.step_index}
        last[self.graph.result] = len(self.steps)
        live: list[tuple[fx.Node, ...]] = []
        alive = [] if self.reread_input else [self.graph.source]
        for index, step in enumerate(self.steps):
            alive = [node for node in [*alive, step] if last.get(node, -1) > index]
            live.append(tuple(alive))
        return tuple(live)

    @cached_property
    def state_on_both_sides(self) -> tuple[frozenset[str], ...]:
        """Names of the state tensors that are used both before and after a cut behind each step, by index of the step.

        A step is an operation that depends on the input. Tied weights have the first of their names.
        """
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, names in enumerate(self.weights_used):
            for name in self.first_names(names):
                first.setdefault(name, index)
                last[name] = index
        return tuple(
            frozenset(name for name in last if first[name] <= index < last[name])
            for index in range(len(self.steps))
        )

    @cached_property
    def shareable_weights(self) -> frozenset[str]:
        """Names of the parameters, which several units may read, each under the first of its names.

        A buffer that forward changes is left out, because it belongs to one unit.
        """
        state = self.graph.root.state_dict(keep_vars=True)
        return self.first_names(name for name, tensor in state.items() if isinstance(tensor, nn.Parameter))

    def first_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return the set ``names`` of state tensors, with the first name of each tied tensor (a tensor with several
        names).
        """
        return frozenset(self._first_name[name] for name in names)

    @cached_property
    def _first_name(self) -> Mapping[str, str]:
        first: dict[int, str] = {}
        state = self.graph.root.state_dict(keep_vars=True)
        return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}

    def is_valid_cut(self, index: int) -> bool:
        """Return True if a cut may lie after the step at ``index``.

        One tensor with a batch dimension is live there, and both sides have no state tensor in common except shared
        weights.
        """
        live = self.live_values[index]
        return (
            len(live) == 1
            and self.is_sample_tensor(live[0])
            and self.state_on_both_sides[index] <= self.shared_weights
        )

    def is_sample_tensor(self, node: fx.Node) -> bool:
        """Return True if ``node`` is a computed tensor (batch, ...) whose other dimensions do not depend on the batch
        size.
        """
        value = node.meta["val"]
        if node is self.graph.source or not isinstance(value, Tensor) or value.dim() == 0:
            return False
        leading, *rest = map(_size, value.shape)
        varies = (
            not isinstance(size, int) or (isinstance(self._batch, int) and size % self._batch == 0)
            for size in rest
        )
        return bool(leading == self._batch) and not any(varies)

    def _computed_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that ``node`` depends on.

        The batch size and additional inputs depend on none, because every unit (stage of the model) reads them itself.
        """
        has_own = self.is_batch_size(node) or self.is_extra_input(node)
        return [] if has_own else self.inputs_of(node)

    def _state_names(self, nodes: Iterable[fx.Node]) -> Iterator[str]:
        """Yield the names of the state tensors that ``nodes`` read, including those of called leaf modules (submodules
        that a trace does not enter).
        """
        for node in nodes:
            call = self.graph.leaf_call(node)
            if node in self.graph.state:
                yield self.graph.state[node]
            elif call is not None:
                state = self.graph.root.get_submodule(call.path).state_dict()
                yield from (f"{call.path}.{name}" for name in state)

    @cached_property
    def _batch(self) -> Any:
        """Size of the batch in the trace: a number, or a sympy expression if it is symbolic."""
        return _size(self.graph.source.meta["val"].shape[0])

    @cached_property
    def _input_dependent(self) -> frozenset[fx.Node]:
        """Operations that depend on the input or on random numbers, write state, or share memory with such a write."""
        dependent = {self.graph.source}
        for group in self._written_groups:
            # Each step moves state, so a write to it counts as one even if its value is the same for every input.
            if not self.graph.state.keys().isdisjoint(group):
                dependent.update(node for node in group if writes(node))
        while True:
            before = len(dependent)
            for node in self.operations:
                has_own = self.is_batch_size(node) or self.is_extra_input(node)
                if not has_own and (is_random(node) or not dependent.isdisjoint(self.inputs_of(node))):
                    dependent.add(node)
            # A write may come after a read of the same memory, so that one pass in order does not suffice.
            for group in self._written_groups:
                if not dependent.isdisjoint(group):
                    dependent.update(node for node in group if node.op == "call_function")
            if len(dependent) == before:
                return frozenset(dependent - {self.graph.source})

    @cached_property
    def _written_groups(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Groups of nodes that share memory, each in the order of the graph.

        Groups in which no operation writes are left out.
        """
        owner: dict[fx.Node, fx.Node] = {}
        for node in self.graph.graph.nodes:
            bases = [owner[base] for base in _aliased_arguments(node)]
            owner[node] = bases[0] if bases else node
            merged = set(bases[1:])
            owner |= {other: owner[node] for other, base in owner.items() if base in merged}
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node, base in owner.items():
            groups.setdefault(base, []).append(node)
        return tuple(tuple(group) for group in groups.values() if any(map(writes, group)))

    @cached_property
    def _earlier_writes(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """Earlier operations that write in place to memory that an operation reads, by the reading operation."""
        order = {node: position for position, node in enumerate(self.operations)}
        by_reader: dict[fx.Node, list[fx.Node]] = {}
        for group in self._written_groups:
            writers = [node for node in group if writes(node)]
            readers = {user for node in group for user in node.users if user in order}
            for reader in readers:
                earlier = [writer for writer in writers if order[writer] < order[reader]]
                by_reader.setdefault(reader, []).extend(earlier)
        return by_reader


def check_not_random(graph: TracedGraph, remedy: str) -> None:
    """Check that no operation outside of leaf modules (submodules that a trace does not enter) draws random numbers.

    Args:
        graph: Traced graph.
        remedy: End of the error text.

    Raises:
        ModelError: An operation draws random numbers.
    """
    for node in random_nodes(graph.graph):
        source = source_of(node)
        raise ModelError(
            f"{node.target} in {path_of(node) or type(graph.root).__name__} draws random numbers {remedy}"
            + (f" (at {source})" if source else ""),
            operation=str(node.target),
            refused=True,
            source=source,
        )


def check_same_in_both_modes(inference: TracedGraph, training: TracedGraph) -> None:
    """Check that the code outside of leaf modules (submodules that a trace does not enter) computes the same in
    training and in inference.

    Args:
        inference: Trace of the module in inference mode.
        training: Trace of the same module in training mode.

    Raises:
        ModelError: An operation differs between the two graphs.
    """
    lines = [graph.describe() for graph in (inference, training)]
    nodes = [graph.operations() for graph in (inference, training)]
    for (before, after), pair in zip(zip_longest(*lines), zip_longest(*nodes), strict=True):
        if before != after:
            names = [(line or "nothing").partition("(")[0] for line in (after, before)]
            source = next(filter(None, (source_of(node) for node in reversed(pair) if node is not None)), "")
            raise ModelError(
                f"{type(training.root).__name__} computes {names[0]} in training where it computes {names[1]} in "
                "inference" + (f" (at {source})" if source else "") + "; put what differs into a submodule "
                "that no cut opens",
                training=after,
                inference=before,
                source=source,
            )


def _size(size: int | torch.SymInt) -> Any:
    """Return a size as a number, or as a sympy expression if it depends on the batch size."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _base_of_view(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` is a view of, through any number of views; ``node`` itself if it is no view."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of ``node`` whose memory its result may share."""
    if node.target is operator.getitem:
        return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    return [
        argument
        for declared, argument in zip(schema.arguments, node.args, strict=False)
        if declared.alias_info is not None and isinstance(argument, fx.Node)
    ]
