"""What each node of a training graph is for, told by the graph itself: which module it serves, and in which phase.

Tracing, decompositions and clean-ups leave no names of modules on nodes, but the ports keep those of the weights:

- ``forward``: what the loss and the other metrics are computed from.
- ``update``: what turns gradients into new state: walking back from the state outputs, the element-wise ops that are not
  forward. Moving statistics are among them.
- ``backward``: the rest. Recomputed activations are among it, and the second pass of a method that takes two gradients.
- module: that of the weight that the node reads, or whose gradient it makes. Any other node serves who reads its result in
  the backward pass and where it moves data, and who made its operands in the forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.wire.bundle.sources import Node, Phase

LOSS = "metric.loss"
_STATE = ("state.", "update.", "weights.")
_WEIGHT = re.compile(r"(state\.)?weights\.|update\.")
_PARTS = re.compile(r"[./]")


@dataclass(frozen=True)
class Op:
    """A node of either format: values are named, sizes are in bytes."""

    name: str
    op: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    macs: int = 0
    nbytes: int = 0
    elementwise: bool = False
    moves: bool = False


@dataclass(frozen=True)
class Nodes:
    """A graph's ops in order, and its outputs: the value that each output port holds."""

    ops: tuple[Op, ...]
    outputs: Mapping[str, str] = field(default_factory=dict)

    def attributed(self) -> dict[str, Node]:
        """Every op by name, with its phase and module."""
        phases = _phases(self)
        modules = _modules(self, phases)
        return {
            op.name: Node(op.op, phases[op.name], modules[op.name], op.macs, op.nbytes) for op in self.ops
        }


def _phases(nodes: Nodes) -> dict[str, Phase]:
    maker = _makers(nodes.ops)
    metrics = [value for port, value in nodes.outputs.items() if port.startswith("metric.")]
    losses = [value for port, value in nodes.outputs.items() if port == LOSS] or metrics
    states = [value for port, value in nodes.outputs.items() if port.startswith(_STATE)]
    forward = _before(losses or list(nodes.outputs.values()), maker)
    forward |= _before(metrics, maker) - _before(states, maker)
    update = _before(states, maker, stops=lambda op: op.name in forward or not op.elementwise)
    phases: dict[str, Phase] = {}
    for op in nodes.ops:
        phases[op.name] = "forward" if op.name in forward else "update" if op.name in update else "backward"
    return phases


def _makers(ops: Iterable[Op]) -> dict[str, Op]:
    return {value: op for op in ops for value in op.makes}


def _before(
    values: Sequence[str], maker: Mapping[str, Op], stops: Callable[[Op], bool] = lambda _: False
) -> set[str]:
    """Names of the ops that ``values`` are computed from, as far as the first that ``stops``, which is left out."""
    names: set[str] = set()
    open_values = list(values)
    while open_values:
        op = maker.get(open_values.pop())
        if op is not None and op.name not in names and not stops(op):
            names.add(op.name)
            open_values += op.reads
    return names


def _modules(nodes: Nodes, phases: Mapping[str, Phase]) -> dict[str, str]:
    """Own modules first; then readers are asked, from the end, and makers, from the beginning."""
    attribution = _own(nodes)
    readers: dict[str, list[Op]] = {}
    for op in nodes.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    maker = _makers(nodes.ops)
    for op in reversed(nodes.ops):
        if (op.moves or phases[op.name] == "backward") and not attribution.get(op.name):
            after = (
                attribution.get(reader.name, "") for value in op.makes for reader in readers.get(value, ())
            )
            attribution[op.name] = next(filter(None, after), "")
    for op in nodes.ops:
        if not attribution.get(op.name):
            before = (
                attribution.get(maker[value].name, "") for value in reversed(op.reads) if value in maker
            )
            attribution[op.name] = next(filter(None, before), "")
    return attribution


def _own(nodes: Nodes) -> dict[str, str]:
    """Modules of the ops that read a weight, seen through ops that move data, or make a gradient or a new weight."""
    ports = {value: port for port, value in nodes.outputs.items()}
    named = [*nodes.outputs, *(value for op in nodes.ops for value in op.reads if value not in ports)]
    known = {_weight_of(port) for port in named} - {""}
    served: dict[str, str] = {}
    modules: dict[str, str] = {}

    def of(value: str) -> str:
        return _of_port(ports.get(value, value), known)

    for op in nodes.ops:
        module = next(filter(None, (of(value) or served.get(value, "") for value in op.reads)), "")
        if module:
            modules[op.name] = module
            if op.moves:
                served |= dict.fromkeys(op.makes, module)
    maker = _makers(nodes.ops)
    for port, value in nodes.outputs.items():
        if module := _of_port(port, known):
            for name in _making(value, maker):
                modules.setdefault(name, module)
    return modules


def _making(value: str, maker: Mapping[str, Op]) -> set[str]:
    """The ops that move and combine entries into ``value``, and those that make what they combine."""
    names: set[str] = set()
    open_values = [value]
    while open_values:
        op = maker.get(open_values.pop())
        if op is not None and op.name not in names:
            names.add(op.name)
            open_values += op.reads if op.moves or op.elementwise else ()
    return names


def _weight_of(port: str) -> str:
    """``state.weights.layer1.conv.weight``, ``update.c/layer1.conv.weight`` -> ``layer1.conv``; "" for a port that is of no
    weight."""
    prefix = _WEIGHT.match(port)
    return port[prefix.end() :].rpartition("/")[2].rpartition(".")[0] if prefix else ""


def _of_port(port: str, known: Collection[str]) -> str:
    """The module in ``known`` of what a method keeps beside a weight: ``state.adam.m.layer1.conv.weight`` ->
    ``layer1.conv``. Longer paths first; "" for what belongs to no weight."""
    if not port.startswith(_STATE):
        return ""
    parts = _PARTS.split(port.rpartition(".")[0])
    return next(filter(known.__contains__, (".".join(parts[at:]) for at in range(1, len(parts)))), "")
