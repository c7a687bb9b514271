"""Part of a traced graph as a module: one tensor in, one tensor out, with the names of the original weights."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from edgefl.models.inputs import InputLayer
from edgefl.models.partition.dataflow import Dataflow
from edgefl.models.partition.normalize import arguments, origin_of, path_of
from edgefl.models.partition.tracer import LeafCall, TensorSlot
from edgefl.wire.bundle.manifest import SAMPLE


class ConstantLayer(nn.Module):
    """Layer that returns a constant tensor.

    It is a non-persistent buffer, so it moves between devices with the unit (stage of the model).
    """

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.detach().clone(), persistent=False)

    def forward(self) -> Tensor:
        return self.value


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Part of a dataflow that becomes one unit: its steps number ``start`` to ``stop - 1``.

    They compute the node ``result`` from the node ``source``, the unit's input. A step is an operation that depends on the
    input of the model.
    """

    dataflow: Dataflow
    start: int
    stop: int
    source: fx.Node
    result: fx.Node

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes that the module must compute, in order: the steps, and the weights, constants and operations they
        need.
        """
        reached = {
            node
            for step in self.dataflow.steps[self.start : self.stop]
            for node in self.dataflow.dependencies(step)
        }
        return [node for node in self.dataflow.graph.graph.nodes if node in reached]

    @property
    def state_names(self) -> frozenset[str]:
        """Names of the state tensors that the subgraph uses."""
        return frozenset().union(*self.dataflow.weights_used[self.start : self.stop])

    @property
    def submodule(self) -> str:
        """Path of the submodule of which the subgraph is exactly one call, "" if it computes anything else."""
        graph = self.dataflow.graph
        nodes = [node for node in self.nodes if node.target is not operator.getitem]
        call = graph.leaf_call(nodes[0]) if len(nodes) == 1 else None
        if call is None or call.results != ((),) or nodes[0].args[0] != [self.source]:
            return ""
        return call.path if _reads_one_tensor(graph.root.get_submodule(call.path), call) else ""

    def to_module(self) -> nn.Module:
        """Return the subgraph as a module of one input and one output.

        It is the submodule of the traced module itself if the subgraph is exactly one call of it, else a new graph
        module. Both share the tensors of the traced module.
        """
        root = self.dataflow.graph.root
        return root.get_submodule(self.submodule) if self.submodule else _GraphBuilder(self).build()


def _reads_one_tensor(module: nn.Module, call: LeafCall) -> bool:
    """Return True if ``call``, a call of ``module``, is ``module(x)``, apart from arguments that equal their defaults."""
    args, kwargs = call.arguments
    try:
        parameters = inspect.signature(module.forward)
        bindings = list(parameters.bind(*args, **kwargs).arguments.items())
    except (TypeError, ValueError):
        return False
    defaults = {name: parameter.default for name, parameter in parameters.parameters.items()}
    return bindings[0][1] == TensorSlot(0) and all(value is defaults[name] for name, value in bindings[1:])


class _GraphBuilder:
    """Builder of the graph module of a subgraph. It copies the nodes one by one."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._subgraph = subgraph
        self._traced = subgraph.dataflow.graph
        self._root = self._traced.root
        self._graph = fx.Graph()
        self._x = self._graph.placeholder("x")
        self._copies: dict[fx.Node, Any] = {subgraph.source: self._x}
        # Modules and tensors of the graph module by path.
        self._targets: dict[str, object] = {}
        # Names of parameters by identity; those of leaf modules first, because tied weights keep one name.
        calls = (self._traced.leaf_call(node) for node in subgraph.nodes)
        self._names = {
            id(parameter): f"{path}.{name}"
            for path in dict.fromkeys(call.path for call in calls if call is not None)
            for name, parameter in self._root.get_submodule(path).named_parameters(remove_duplicate=False)
        }
        self._device: fx.Node | None = None

    def build(self) -> fx.GraphModule:
        nodes, dataflow = self._subgraph.nodes, self._subgraph.dataflow
        # The model's input, if this unit reads it again.
        source, sample = self._traced.source, dataflow.reread_input
        read = {inner for node in nodes for inner in dataflow.inputs_of(node)}
        if sample is not None and source is not self._subgraph.source and source in read:
            self._copies[source] = self._call(f"given_{SAMPLE}", InputLayer(SAMPLE, sample), (self._x,), {})
        for node in nodes:
            self._copies[node] = self._copy(node)
        self._graph.output(self._copies[self._subgraph.result])
        made = fx.GraphModule(self._targets, self._graph, class_name="Unit")
        made.training = self._root.training
        return made

    def _copy(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._copy_tensor(node)
        if (call := self._traced.leaf_call(node)) is not None:
            return self._copy_leaf(call, node)
        if self._subgraph.dataflow.is_batch_size(node):
            return self._graph.call_method("size", (self._x, 0))
        if node.target is operator.getitem:
            base, index = arguments(node)
            if isinstance(self._copies[base], list):  # the results of a leaf module
                return self._copies[base][index]
        if node.target is torch.ops.aten.dropout.default:
            return self._copy_dropout(node)
        copied = self._graph.node_copy(node, self._copies.__getitem__)
        # Tensors are made on the device of the unit's input, not on that of the trace.
        copied.args, copied.kwargs = pytree.tree_map(self._on_input_device, (copied.args, copied.kwargs))
        return copied

    def _copy_tensor(self, node: fx.Node) -> fx.Node:
        if node not in self._traced.state:
            constant = ConstantLayer(self._traced.constants[node])
            return self._call(f"constant_{node.name}", constant, (), {})
        name = self._traced.state[node]
        path, _, last = name.rpartition(".")
        tensor = getattr(self._root.get_submodule(path), last)
        name = self._names.setdefault(id(tensor), name)
        self._targets[name] = tensor
        return self._graph.create_node("get_attr", name)

    def _copy_leaf(self, call: LeafCall, node: fx.Node) -> list[fx.Node]:
        """Copy the call of a leaf module (submodule that the trace did not enter), which ``node`` represents.

        Return one node per tensor that the call returns.
        """
        # An extra input only needs to know the number of rows.
        is_extra = self._subgraph.dataflow.is_extra_input(node)
        tensors = [self._x if is_extra else self._copies[argument] for argument in arguments(node)[0]]
        args, kwargs = pytree.tree_map(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf, call.arguments
        )
        result = self._call(call.path, self._root.get_submodule(call.path), args, kwargs)
        result.meta.update(origin_of(node))
        return [
            reduce(lambda value, key: self._graph.call_function(operator.getitem, (value, key)), keys, result)
            for keys in call.results
        ]

    def _copy_dropout(self, node: fx.Node) -> Any:
        """Return a call of a new dropout layer instead of ``F.dropout``, or the input itself if the trace dropped nothing.

        The layer follows the mode of the unit (stage of the model) and not that of the trace.
        """
        x, rate, training = arguments(node)
        if not training or not rate:
            return self._copies[x]
        path = path_of(node)
        name = f"{path}.{node.name}" if path else node.name
        return self._call(name, nn.Dropout(float(rate)), (self._copies[x],), {})

    def _call(self, path: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Add ``module`` to the graph module at ``path``, and return a node that calls it with these arguments."""
        self._targets[path] = module
        return self._graph.create_node("call_module", path, tuple(args), kwargs)

    def _on_input_device(self, leaf: Any) -> Any:
        """Replace a device by a node that reads the device of the subgraph's input. Return any other value unchanged."""
        if not isinstance(leaf, torch.device):
            return leaf
        if self._device is None:
            with self._graph.inserting_after(self._x):
                self._device = self._graph.call_function(getattr, (self._x, "device"))
        return self._device
