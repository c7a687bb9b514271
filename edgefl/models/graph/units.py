"""A stretch of a traced graph as a module of its own: one tensor in, one tensor out, weights under their own names."""

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

from edgefl.models.graph.calls import Call, Slot
from edgefl.models.graph.flow import Flow
from edgefl.models.graph.plain import arguments, path_of, told_by
from edgefl.models.layers.given import Given
from edgefl.wire.bundle.manifest import SAMPLE


class Constant(nn.Module):
    """A tensor that is no weight: it moves with the unit and is not part of its state."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.detach().clone(), persistent=False)

    def forward(self) -> Tensor:
        return self.value


@dataclass(frozen=True, eq=False)
class Stretch:
    """Steps ``start:stop`` of a flow, which turn ``source`` into ``result``."""

    flow: Flow
    start: int
    stop: int
    source: fx.Node
    result: fx.Node

    @property
    def nodes(self) -> list[fx.Node]:
        """Everything to compute, in order: the steps and what they need that is no step. Placeholders come first."""
        reached = {
            node for step in self.flow.steps[self.start : self.stop] for node in self.flow.upstream(step)
        }
        return [node for node in self.flow.traced.graph.nodes if node in reached]

    @property
    def state(self) -> frozenset[str]:
        """Names of the root's state tensors that it uses."""
        return frozenset().union(*self.flow.state[self.start : self.stop])

    @property
    def alone(self) -> str:
        """Path of the submodule that the stretch calls if it does nothing else; empty otherwise."""
        traced = self.flow.traced
        nodes = [node for node in self.nodes if node.target is not operator.getitem]
        call = traced.call(nodes[0]) if len(nodes) == 1 else None
        if call is None or call.results != ((),) or nodes[0].args[0] != [self.source]:
            return ""
        return call.path if _reads_nothing_else(traced.root.get_submodule(call.path), call) else ""

    def module(self) -> nn.Module:
        """The stretch as a module, a submodule of the traced one where it is no more."""
        return self.flow.traced.root.get_submodule(self.alone) if self.alone else _Builder(self).module()


def _parameters(stretch: Stretch) -> dict[int, str]:
    """Names of the parameters of the closed submodules that the stretch calls, by their identity."""
    traced = stretch.flow.traced
    paths = dict.fromkeys(call.path for call in map(traced.call, stretch.nodes) if call is not None)
    return {
        id(parameter): f"{path}.{name}"
        for path in paths
        for name, parameter in traced.root.get_submodule(path).named_parameters(remove_duplicate=False)
    }


def _reads_nothing_else(module: nn.Module, call: Call) -> bool:
    """Whether the call is ``module(x)``, but for arguments given by their default values."""
    args, kwargs = call.arguments
    try:
        bindings = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments.items())
    except (TypeError, ValueError):
        return False
    defaults = {name: p.default for name, p in inspect.signature(module.forward).parameters.items()}
    return bindings[0][1] == Slot(0) and all(value is defaults[name] for name, value in bindings[1:])


class _Builder:
    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._traced = stretch.flow.traced
        self._graph = fx.Graph()
        self._x = self._graph.placeholder("x")
        self._copies: dict[fx.Node, Any] = {stretch.source: self._x}
        self._targets: dict[str, object] = {}
        self._sample()
        self._names = _parameters(stretch)
        self._device: fx.Node | None = None

    def _sample(self) -> None:
        """The model's input, where this unit reads it again."""
        source, again = self._traced.source, self._stretch.flow.again
        read = {inner for node in self._stretch.nodes for inner in self._stretch.flow.needs(node)}
        if again is not None and source is not self._stretch.source and source in read:
            self._copies[source] = self._module(f"given_{SAMPLE}", Given(SAMPLE, again), (self._x,), {})

    def module(self) -> nn.Module:
        for node in self._stretch.nodes:
            self._copies[node] = self._copy(node)
        self._graph.output(self._copies[self._stretch.result])
        made = fx.GraphModule(self._targets, self._graph, class_name="Unit")
        made.training = self._traced.root.training
        return made

    def _copy(self, node: fx.Node) -> Any:
        call = self._traced.call(node)
        if node.op == "placeholder":
            return self._placeholder(node)
        if call is not None:
            return self._results(call, node)
        if self._stretch.flow.is_batch(node):
            return self._graph.call_method("size", (self._x, 0))
        return self._operation(node)

    def _placeholder(self, node: fx.Node) -> fx.Node:
        if node in self._traced.state:
            return self._tensor(self._traced.state[node])
        return self._module(f"constant_{node.name}", Constant(self._traced.constants[node]), (), {})

    def _operation(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            base, index = arguments(node)
            if isinstance(self._copies[base], list):
                return self._copies[base][index]
        if node.target is torch.ops.aten.dropout.default:
            return self._dropout(node)
        copied = self._graph.node_copy(node, self._copies.__getitem__)
        copied.args, copied.kwargs = self._anywhere(copied.args), self._anywhere(copied.kwargs)
        return copied

    def _tensor(self, name: str) -> fx.Node:
        path, _, last = name.rpartition(".")
        tensor = getattr(self._traced.root.get_submodule(path), last)
        # Of tied weights one name does; that in a layer which stays closed, if there is one.
        name = self._names.setdefault(id(tensor), name)
        self._targets[name] = tensor
        return self._graph.create_node("get_attr", name)

    def _module(self, path: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        self._targets[path] = module
        return self._graph.create_node("call_module", path, tuple(args), kwargs)

    def _results(self, call: Call, node: fx.Node) -> list[fx.Node]:
        own = self._stretch.flow.is_given(node)  # which needs to know no more than how many rows there are
        tensors = [self._x if own else self._copies[argument] for argument in arguments(node)[0]]
        args, kwargs = pytree.tree_map(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, call.arguments
        )
        out = self._module(call.path, self._traced.root.get_submodule(call.path), args, kwargs)
        out.meta.update(told_by(node))
        return [
            reduce(lambda value, key: self._graph.call_function(operator.getitem, (value, key)), place, out)
            for place in call.results
        ]

    def _dropout(self, node: fx.Node) -> Any:
        """``F.dropout`` as a layer, which knows by itself whether it trains."""
        x, rate, training = arguments(node)
        if not training or not rate:
            return self._copies[x]
        path = path_of(node)
        name = f"{path}.{node.name}" if path else node.name
        return self._module(name, nn.Dropout(float(rate)), (self._copies[x],), {})

    def _anywhere(self, arguments: Any) -> Any:
        """``arguments`` with the device that was traced on replaced by that of the unit's input."""
        return pytree.tree_map(self._here, arguments)

    def _here(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.device):
            return leaf
        if self._device is None:
            with self._graph.inserting_after(self._x):
                self._device = self._graph.call_function(getattr, (self._x, "device"))
        return self._device
