"""Constant entries of a network's values: those that are equal for every input."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.inputs import InputLayer
from edgefl.models.partition.dataflow import Dataflow
from edgefl.models.partition.subgraph import Subgraph
from edgefl.models.partition.tracer import ModuleTracer
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.tied import units_with_tied_weights
from edgefl.submodels.compaction import ops

# Two rows: with one, batch statistics of a channel could have a single value, which torch refuses.
_ROWS = 2
_EXACT = ops.POINTWISE | ops.LINEAR | ops.MAXIMA | ops.NORMS


_known: WeakKeyDictionary[ModelSpec, nn.Sequential] = WeakKeyDictionary()


def as_graphs(spec: ModelSpec) -> nn.Sequential:
    """Return the units (stages of the model) of ``spec`` in inference as graphs of ATen operations, under the same
    names, cached per model.

    A unit that cannot be traced, or has tied weights, is returned as a module. Layers of additional inputs are not traced
    into.
    """
    if spec not in _known:
        units, whole = copy_module(spec.module).eval().named_children(), units_with_tied_weights(spec.module)
        _known[spec] = sequential(
            (name, unit if name in whole else _as_graph(unit, spec.boundary(at)))
            for at, (name, unit) in enumerate(units)
        )
    return _known[spec]


def _as_graph(unit: nn.Module, sample: TensorSpec) -> nn.Module:
    inputs = {path for path, module in unit.named_modules() if isinstance(module, InputLayer)}
    try:
        traced = ModuleTracer(unit, sample, inputs).trace(training=False)
    except ModelError:
        return unit
    dataflow = Dataflow(traced)
    return Subgraph(dataflow, 0, len(dataflow.steps), traced.source, traced.result).to_module()


@dataclass(frozen=True, eq=False)
class KnownValues:
    """Values of one graph that are equal for every input.

    Attributes:
        of: Value of each node: float64, NaN for entries that depend on the input. Results that are no tensors are
            as they are.
        carried: Nodes that may depend on the input.
        result: Value of the output.
    """

    of: dict[fx.Node, Any]
    carried: frozenset[fx.Node]
    result: Tensor

    def is_constant(self, node: fx.Node) -> bool:
        """Return True if ``node`` is a float tensor of which no entry depends on the input."""
        value = self.of[node]
        return isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isnan().any())


def unknown_input(sample: TensorSpec) -> Tensor:
    """Return an input tensor all of whose float entries are unknown (NaN). Integers are 0."""
    shape = (_ROWS, *sample.shape)
    if sample.dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=torch.float64)
    return torch.zeros(shape, dtype=sample.dtype)


def find_known_values(graph: fx.GraphModule, x: Tensor) -> KnownValues:
    """Run ``graph`` on ``x``, whose unknown entries are NaN, and return the values that are equal for every input.

    Integers that depend on the input are never known.
    """
    runner = _ConstantInterpreter(copy.deepcopy(graph).double(), graph)
    with torch.no_grad():
        result = runner.run(x)
    return KnownValues(runner.found, frozenset(runner.carried), result)


class _ConstantInterpreter(fx.Interpreter):
    """Interpreter in float64 that keeps NaN exactly where an entry depends on the input."""

    def __init__(self, doubled: fx.GraphModule, graph: fx.GraphModule) -> None:
        super().__init__(doubled)
        self._original = dict(zip(doubled.graph.nodes, graph.graph.nodes, strict=True))
        self.found: dict[fx.Node, Any] = {}
        self.carried: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        own = self._original[n]
        depends = n.op == "placeholder" or any(self._original[i] in self.carried for i in n.all_input_nodes)
        # Sizes are the same for every input.
        if n.op == "call_method" or (n.op == "call_function" and n.target is getattr):
            depends = False
        result = (
            self._carry(n) if depends and n.op in ("call_function", "call_module") else super().run_node(n)
        )
        result = pytree.tree_map(lambda leaf: leaf.double() if _is_float(leaf) else leaf, result)
        if depends:
            self.carried.add(own)
        self.found[own] = result
        return result

    def _carry(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        floats = all(tensor.is_floating_point() for tensor in tensors)
        if floats and ops.packet(n) in ops.KERNELS:
            return _kernel(n, args, kwargs)
        if floats and ops.packet(n) in ops.NORMS and ops.uses_batch(n):
            # Less its own mean 0 is 0 on every runtime; what rounding leaves of another number is blown up.
            args = (torch.where(args[0] == 0, args[0], torch.nan), *args[1:])
        is_python = n.op == "call_function" and not isinstance(n.target, torch._ops.OpOverload)
        if floats and (ops.packet(n) in _EXACT or is_python):
            return getattr(self, n.op)(n.target, args, kwargs)
        clean = pytree.tree_map(lambda leaf: leaf.nan_to_num() if _is_float(leaf) else leaf, (args, kwargs))
        return pytree.tree_map(
            lambda leaf: torch.full_like(leaf, torch.nan) if _is_float(leaf) else leaf,
            getattr(self, n.op)(n.target, *clean),
        )


def _kernel(n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the result of node ``n``, a product with a weight, in which entries that depend on the model's input are NaN.

    An output entry is NaN if it multiplies an unknown entry (NaN) by a weight that is not 0.
    """
    x, weight, *rest = args
    depends = x.isnan()
    target: Any = n.target
    bias = rest[0] if rest else kwargs.get("bias")
    known: Tensor = target(torch.where(depends, 0.0, x), weight, bias, *rest[1:], **_without_bias(kwargs))
    hit = target(depends.double(), (weight != 0).double(), None, *rest[1:], **_without_bias(kwargs))
    return torch.where(hit > 0.5, torch.nan, known)


def _without_bias(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "bias"}


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def read_constants(x: Tensor, node: fx.Node) -> Tensor:
    """Return the constant value of each feature that the kernel ``node`` reads from ``x``, (features,).

    It is NaN if the feature depends on the input, or is not equal at all positions.
    """
    dim = 1 if ops.packet(node) in ops.CONVOLUTIONS else x.dim() - 1
    flat = x.movedim(dim, 0).flatten(1)
    first = flat[:, 0]
    return torch.where((flat == first[:, None]).all(1), first, torch.nan)
