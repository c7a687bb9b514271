"""What the clients of an exchange run: its functions, each recorded once as a list of operations, for one or for many.

Autograd is gone from a recording: it holds forward, backward and update as they ran. For many clients it is the same list
with the clients in front of every tensor that is a client's own (:func:`torch.func.vmap`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from edgefl.config.simulation import SimulationTable
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.errors import ConfigError
from edgefl.simulator.operations.folding import fold, pool_first
from edgefl.simulator.operations.layout import channels_last, large_first
from edgefl.simulator.operations.updates import fuse, in_place, own_results
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array
from edgefl_export.bundle.features import FEATURES, features_of
from edgefl_export.capture.graph import Table, graph_of
from edgefl_export.capture.trace import capture, joint_graph
from edgefl_export.front.tier import Exchange, Tier

# A list of operations as one Python function, which calls torch's kernels with as little between as there can be.

Call = Callable[..., tuple[Tensor, ...]]


def compiled(module: fx.GraphModule) -> Call:
    """``module`` as a function of its placeholders, in order. What nobody reads any more is let go at once."""
    return _Writer(module).function()


class _Writer:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._known: dict[str, Any] = {}
        self._names: dict[fx.Node, str] = {}
        self._last = {used: node for node in module.graph.nodes for used in node.all_input_nodes}

    def function(self) -> Call:
        nodes = list(self._module.graph.nodes)
        given = [self._name(node) for node in nodes if node.op == "placeholder"]
        lines = [line for node in nodes for line in self._lines(node)]
        text = "\n    ".join((f"def run({', '.join(given)}):", *lines))
        exec(compile(text, "<recorded>", "exec"), self._known)
        run: Call = self._known["run"]
        return run

    def _lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            self._names[node] = self._bound(getattr(self._module, str(node.target)))
            return []
        if node.op == "output":
            return [f"return {self._text(node.args[0])}"]
        dying = [
            self._name(used)
            for used in node.all_input_nodes
            if self._last[used] is node and used.op != "get_attr"
        ]
        drop = [f"{' = '.join(dying)} = None"] if dying else []
        return [f"{self._name(node)} = {self._call(node)}", *drop]

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{node.args[1]}]"
        # An overload's own kernel: what stands around it in Python would cost as much as a small kernel.
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        parts = [self._text(each) for each in node.args]
        parts += [f"{key}={self._text(each)}" for key, each in node.kwargs.items()]
        return f"{self._bound(target)}({', '.join(parts)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, list | tuple):
            inner = "".join(f"{self._text(each)}, " for each in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        return repr(value) if type(value) in (int, bool, type(None)) else self._bound(value)

    def _name(self, node: fx.Node) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _bound(self, value: Any) -> str:
        name = f"k{len(self._known)}"
        self._known[name] = value
        return name


# A recorded list of operations on another device than the one it was recorded on.


def move(module: fx.GraphModule, device: torch.device) -> None:
    """What the list makes and keeps of itself lies on ``device`` then. Inputs have to lie there too."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor):
                setattr(module, str(node.target), value.detach().to(device))
        elif isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", device)


_COMMON = frozenset({"weights", "hyper"})
"""Roles that are the same for all clients of a round; of all others each client has its own."""

_IMAGES = frozenset({"batch", "noise"})
_AS_THEY_RAN: Table = {}
"""Torch's own operations, none rewritten for an engine of devices."""
_MOST_TOGETHER = 16
_SMALL_STATE = 512 << 10
"""Bytes of weights and what an optimizer keeps: more take longer to go through than the calls do."""
_HERE = torch.device("cpu")

Recorded = Callable[[Mapping[str, Tensor]], Tensors]
"""Inputs by port -> outputs by port. For many clients, all but weights and scalars have these in front."""


@dataclass
class Functions:
    """The functions of one exchange of a tier, by the names that graphs have in the manifest of its ``bundle``, which holds
    none of them. ``wanted``: clients of the tier that a round aims for; ``table``: where they run, and how exactly."""

    bundle: Bundle
    named: Mapping[str, Function]
    wanted: int = 1
    table: SimulationTable = field(default_factory=SimulationTable)
    _recorded: dict[tuple[str, int], Recorded] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tier: Tier, exchange: Exchange, bundle: Bundle, wanted: int, table: SimulationTable
    ) -> Functions:
        manifest = bundle.manifest
        named = {function.name: function for function in exchange.algorithm.functions}
        named |= {
            chunk.graph: prefix.forward for chunk, prefix in zip(manifest.prefix, tier.prefix, strict=True)
        }
        features = features_of(manifest.data)
        return cls(bundle, named if features is None else named | {FEATURES: features}, wanted, table)

    @property
    def device(self) -> torch.device:
        """Where everything lies that they read and give."""
        return torch.device(self.table.device)

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def steps(self, rows: int, most: int) -> int:
        """Return the local steps of a client with ``rows`` samples, of which it uses at most ``most`` (0: all)."""
        return sum(self.manifest.steps_with(min(rows, most or rows)))

    def blob(self, ref: BlobRef) -> bytes:
        """What texts are read by."""
        return self.bundle.blobs[ref.sha256]

    def features(self, name: str) -> Callable[[Array], Array]:
        """What makes a sample of what a file holds."""
        run = self.recorded(name, 1)
        return lambda rows: (
            run({"batch.0.x": torch.from_numpy(rows).to(self.device)})["record.x"].cpu().numpy()
        )

    @cached_property
    def together(self) -> int:
        """Clients for one call of each function: several where a client's arithmetic costs less than the calls. The model
        and the federation decide, whatever machine this is."""
        apart = {chunk.graph for chunk in self.manifest.prefix}
        graphs = [each for each in self.manifest.of_round if each.name not in apart]
        held = sum(port.nbytes for port in self.manifest.graph(self.manifest.start).outputs_of("state"))
        groups = -(-self.wanted // _MOST_TOGETHER)
        size = -(-self.wanted // max(1, groups))
        if size < 2 or held > _SMALL_STATE or any(_convolves(self.named[each.name]) for each in graphs):
            return 1
        try:
            for each in graphs:
                self.recorded(each.name, size)
        except ConfigError:  # an op that vmap does not know
            return 1
        return size

    @cached_property
    def _steps(self) -> frozenset[str]:
        """The functions that train: what begins and ends a round is exact."""
        phases = self.manifest.phases
        shorter = {bucket.graph for phase in phases for bucket in phase.shorter}
        return frozenset({phase.graph for phase in phases} | shorter)

    def recorded(self, name: str, clients: int) -> Recorded:
        """The function ``name`` for so many clients at once; 1: for one, without a dimension of clients."""
        key = name, clients
        if key not in self._recorded:
            exact = name not in self._steps or self.table.precision == "float32"
            self._recorded[key] = recorded(self.named[name], clients, device=self.device, exact=exact)
        return self._recorded[key]


def recorded(
    function: Function, clients: int, *, device: torch.device = _HERE, exact: bool = True
) -> Recorded:
    """``function`` as a list of operations on ``device``. Inputs of the role ``state`` that it replaces are given up: their
    memory is written to. Not ``exact``: products of bfloat16, as torch.autocast makes them; weights stay float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact, cache_enabled=False):
        joint = joint_graph(function)
    captured = capture(function, _AS_THEY_RAN, joint)
    inputs, outputs, module = tuple(captured.inputs), tuple(captured.outputs), captured.module
    fold(module)
    fuse(module)
    if clients > 1:
        module = _for_many(function, inputs, module, clients)
        fold(module)
        fuse(module)
    else:
        pool_first(module)
        channels_last(module, [role_of(name) in _IMAGES for name in inputs])
        large_first(module)
    own_results(module, [role_of(name) == "state" for name in outputs])
    in_place(module, _replaced(inputs, outputs))
    move(module, device)
    call = compiled(module)

    def run(given: Mapping[str, Tensor]) -> Tensors:
        with torch.no_grad():
            results = call(*[given[name] for name in inputs])
        return dict(zip(outputs, results, strict=True))

    return run


def _convolves(function: Function) -> bool:
    """Whether it has convolutions, which for several clients become grouped ones, slower than each on its own."""
    captured = capture(function, _AS_THEY_RAN)
    return any(node.target is torch.ops.aten.convolution.default for node in captured.module.graph.nodes)


def _replaced(inputs: Sequence[str], outputs: Sequence[str]) -> dict[int, int]:
    """Numbers of the inputs that are state, and those of the outputs in their place."""
    return {
        place: outputs.index(name)
        for place, name in enumerate(inputs)
        if role_of(name) == "state" and name in outputs
    }


def _for_many(
    function: Function, inputs: Sequence[str], module: torch.fx.GraphModule, clients: int
) -> torch.fx.GraphModule:
    """``module`` with the clients in front of all that is a client's own."""
    module.recompile()
    common = [role_of(name) in _COMMON for name in inputs]
    specs = [function.inputs[name] for name in inputs]

    def mapped(*given: Tensor) -> tuple[Tensor, ...]:
        # A number for each client, so that a function which reads nothing of its own has clients, too.
        def one(_client: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
            return tuple(module(*own))

        axes = (0, *(None if each else 0 for each in common))
        return tuple(torch.func.vmap(one, in_dims=axes)(torch.arange(clients), *given))

    example = [
        torch.zeros(spec.shape if shared else (clients, *spec.shape), dtype=spec.dtype)
        for spec, shared in zip(specs, common, strict=True)
    ]
    try:
        return graph_of(mapped, example, _AS_THEY_RAN, fake=True)
    except Exception as error:  # vmap knows not every op, and says so by many classes
        raise ConfigError(
            f"function {function.name!r} cannot run for {clients} clients together: {error}; set simulation.together = 1"
        ) from error
