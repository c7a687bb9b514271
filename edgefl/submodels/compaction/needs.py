"""Entries of values and tensors that a network's output needs, given that kernels can fold constants into their biases."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from edgefl.submodels.compaction import ops
from edgefl.submodels.compaction.constants import KnownValues, read_constants

Needed = dict[fx.Node, Tensor]


@dataclass(frozen=True, eq=False)
class NeededEntries:
    """Entries of a graph's state tensors and input that its needed output depends on.

    Attributes:
        used: Needed positions of each dimension of a state tensor, bool, by (name, dimension).
        source: Needed entries of the input, bool.
    """

    used: Mapping[tuple[str, int], Tensor]
    source: Tensor


def find_needs(graph: fx.GraphModule, known: KnownValues, result: Tensor) -> NeededEntries:
    """Return the entries of state tensors and input that a graph needs, found backwards, operation by operation.

    Args:
        graph: Graph of a unit (stage of the model).
        known: Values of its nodes that are equal for every input.
        result: Needed entries of its output, bool, in the output's shape.
    """
    return _NeedsPass(graph, known).back(result)


def foldable_constants(node: fx.Node, known: KnownValues) -> Tensor:
    """Return the constants (features,) that the kernel ``node`` can fold into its bias. NaN: it must read the feature.

    Zeros beyond the borders are not constant, so with padding only 0 can be folded. A kernel whose weight is used
    twice cannot fold any.

    Args:
        node: Convolution or matrix product with a weight.
        known: Known values of the graph.
    """
    constants = read_constants(known.of[_argument(node, 0)], node)
    if not _is_alone(_argument(node, 1)):
        return torch.full_like(constants, torch.nan)
    if ops.packet(node) in ops.CONVOLUTIONS and ops.is_padded(node):
        return torch.where(constants == 0, constants, torch.nan)
    return constants


def is_kernel(node: fx.Node, known: KnownValues) -> bool:
    """Return True if ``node`` multiplies with a weight that is a state tensor."""
    if ops.packet(node) not in ops.KERNELS or node not in known.carried:
        return False
    weight = _argument(node, 1)
    return (
        weight.op == "get_attr"
        and _argument(node, 0) in known.carried
        and bool(known.of[node].is_floating_point())
    )


def _argument(node: fx.Node, position: int) -> fx.Node:
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def _is_alone(weight: fx.Node) -> bool:
    """Return True if a single operation reads the state tensor of the node ``weight``.

    Several nodes may read one tensor.
    """
    same = [node for node in weight.graph.nodes if node.op == "get_attr" and node.target == weight.target]
    return sum(len(node.users) for node in same) == 1


@dataclass(eq=False)
class _NeedsPass:
    """Backward pass through one graph that marks needed entries."""

    graph: fx.GraphModule
    known: KnownValues
    needed: Needed = field(default_factory=dict)
    used: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def back(self, result: Tensor) -> NeededEntries:
        nodes = list(self.graph.graph.nodes)
        self.needed = {
            node: torch.zeros(value.shape, dtype=torch.bool)
            for node, value in self.known.of.items()
            if isinstance(value, Tensor)
        }
        output = self.graph.graph.output_node().args[0]
        assert isinstance(output, fx.Node)
        self.needed[output] |= result
        for node in reversed(nodes):
            if node.op in ("call_function", "call_module", "call_method"):
                self._step(node)
            elif node.op == "get_attr":
                self._mark_state(str(node.target), self.needed[node])
        source = next(node for node in nodes if node.op == "placeholder")
        return NeededEntries(self.used, self.needed[source])

    def _step(self, node: fx.Node) -> None:
        rule, needed = self._rule(node), self._needed(node)
        is_size = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self.known.of[node]))
        if is_size or (needed is not None and not needed.any()):
            return
        if needed is not None and is_kernel(node, self.known):
            self._kernel(node, needed)
        elif needed is not None and rule is not None:
            self._pull(node, rule, needed)
        else:
            for read in node.all_input_nodes:
                if read in self.needed:
                    self.needed[read].fill_(True)

    def _needed(self, node: fx.Node) -> Tensor | None:
        """Return the needed entries of the result of ``node``, or None if it has several results and all may be needed."""
        if node in self.needed:
            return self.needed[node]
        parts = [self.needed[user] for user in node.users if user in self.needed]
        if not any(bool(part.any()) for part in parts):
            return torch.zeros(1, dtype=torch.bool) if len(parts) == len(node.users) else None
        first = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        return (
            self.needed[first[0]] if ops.packet(node) in ops.NORMS and len(first) == len(node.users) else None
        )

    def _rule(self, node: fx.Node) -> Callable[[fx.Node, Sequence[Tensor]], Tensor] | None:
        kind = ops.packet(node)
        if kind in ops.NORMS:
            return _norm
        if kind in ops.POINTWISE:
            return _pointwise
        if kind in ops.MAXIMA:
            return self._maximum
        if kind in ops.LINEAR:
            return self._itself
        return None

    def _pull(
        self, node: fx.Node, rule: Callable[[fx.Node, Sequence[Tensor]], Tensor], needed: Tensor
    ) -> None:
        """Mark the needed entries of the inputs of ``node`` in :attr:`needed`.

        Args:
            node: Operation.
            rule: Differentiable model of the operation. An input is needed if a needed output has a positive
                derivative by it.
            needed: Needed entries of the result, bool.
        """
        read = [inner for inner in node.all_input_nodes if inner in self.needed]
        ones = [
            torch.ones(self.needed[inner].shape, dtype=torch.float64, requires_grad=True) for inner in read
        ]
        if not read:
            return
        grads = torch.autograd.grad(rule(node, ones), ones, needed.double(), allow_unused=True)
        for inner, grad in zip(read, grads, strict=True):
            if grad is not None:
                self.needed[inner] |= grad > 0

    def _itself(self, node: fx.Node, leaves: Sequence[Tensor]) -> Tensor:
        put = dict(zip([i for i in node.all_input_nodes if i in self.needed], leaves, strict=True))
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda inner: put.get(inner, self.known.of[inner])
        )
        target = node.target
        assert callable(target)
        result: Tensor = target(*args, **kwargs)
        return result

    def _maximum(self, node: fx.Node, leaves: Sequence[Tensor]) -> Tensor:
        shape = self.needed[node].shape
        [x] = leaves
        return x.flatten(2).sum(2).reshape(*shape[:2], *(1 for _ in shape[2:])).expand(shape)

    def _kernel(self, node: fx.Node, needed: Tensor) -> None:
        x, weight = _argument(node, 0), _argument(node, 1)
        dim = 1 if ops.packet(node) in ops.CONVOLUTIONS else needed.dim() - 1
        read = foldable_constants(node, self.known).isnan().double()
        nonzero = (self.known.of[weight] != 0).double()
        across = [-1 if at == dim else 1 for at in range(needed.dim())]
        leaf = torch.ones(self.needed[x].shape, dtype=torch.float64, requires_grad=True)
        rest = [None, *node.args[3:]] if len(node.args) > 2 else []
        kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
        target = node.target
        assert callable(target)
        out = target(leaf * read.reshape(across), nonzero, *rest, **kwargs)
        (grad,) = torch.autograd.grad(out, leaf, needed.double())
        self.needed[x] |= grad > 0
        outside = _any_but(needed, dim)
        inside = _any_but(grad > 0, dim).reshape(ops.groups_of(node), -1).any(0)
        self._mark(str(weight.target), 0, outside)
        self._mark(str(weight.target), 1, inside)
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if isinstance(bias, fx.Node):
            self.needed[bias] |= outside

    def _mark_state(self, name: str, needed: Tensor) -> None:
        if needed.any() or (name, 0) not in self.used:
            for dim in range(needed.dim()):
                self._mark(name, dim, _any_but(needed, dim))

    def _mark(self, name: str, dim: int, used: Tensor) -> None:
        before = self.used.get((name, dim))
        self.used[name, dim] = used if before is None else before | used


def _any_but(mask: Tensor, dim: int) -> Tensor:
    """Return a bool tensor with an entry per index of dimension ``dim``: True if ``mask`` has a True entry at that
    index.
    """
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1)


def _pointwise(_node: fx.Node, leaves: Sequence[Tensor]) -> Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total


def _norm(_node: fx.Node, leaves: Sequence[Tensor]) -> Tensor:
    x, *tensors = leaves
    for tensor in tensors:
        x = x + tensor.reshape([-1 if at == 1 else 1 for at in range(x.dim())])
    return x
