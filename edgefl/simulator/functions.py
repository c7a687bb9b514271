"""Functions of the clients, recorded as lists of torch operations for one or several clients, and the plan of a
simulation.

A recording does not use autograd: it contains the operations of forward pass, backward pass and update. For several
clients it is the same list, with a leading client dimension on each tensor that belongs to a client
(:func:`torch.func.vmap`).
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

from edgefl.config import Federation
from edgefl.config.rounds import SimulationTable
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.setup.bundles import outline_of
from edgefl.simulator.operations.folding import fold, pool_first
from edgefl.simulator.operations.layout import channels_last, large_first, pools_channels_last
from edgefl.simulator.operations.updates import fuse, in_place, own_results
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array
from edgefl_export.capture.graph import Table, graph_of
from edgefl_export.capture.trace import capture, decompose, trace
from edgefl_export.compiler.request import FEATURES, Exchange, TierTraining, features_of
from edgefl_server.compose import compose_with
from edgefl_server.coordinator.roster import share
from edgefl_server.events import EventListener
from edgefl_server.run_spec import RunSpec

# A list of operations as one Python function, which calls torch's kernels with as little between as there can be.

Call = Callable[..., tuple[Tensor, ...]]


def compile_list(module: fx.GraphModule) -> Call:
    """Return the operations of ``module`` as a Python function.

    The function takes the placeholders as positional arguments, in order, and returns a tuple of tensors. It frees
    each value after its last use.
    """
    return _FunctionWriter(module).function()


class _FunctionWriter:
    """Writer of a Python function that runs a recorded list of operations."""

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
        # An overload's own kernel: its Python wrapper would cost as much as a small kernel.
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
    """Move the constants of a recorded list of operations, and the tensors that it creates, to ``device``, in place.

    Inputs of later calls must be on that device too.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor):
                setattr(module, str(node.target), value.detach().to(device))
        elif isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", device)


_COMMON = frozenset({"weights", "hyper"})
"""Roles that all clients of a round share. Inputs of all other roles differ per client."""

_IMAGES = frozenset({"batch", "noise"})
_AS_THEY_RAN: Table = {}
"""Torch's own operations, without rewrites for engines of devices."""
_MOST_TOGETHER = 16
_SMALL_STATE = 512 << 10
"""Bytes of weights and optimizer state up to which calls cost more than arithmetic."""
_HERE = torch.device("cpu")

Recorded = Callable[[Mapping[str, Tensor]], Tensors]
"""Inputs by port -> outputs by port. For many clients all but weights and scalars have a leading client dimension."""


@dataclass
class Functions:
    """Recorded functions that the clients of a tier run in one exchange (a round of an algorithm that may need several).

    They replace the graphs of a bundle and have the names of these graphs in its manifest.

    Attributes:
        bundle: Bundle with the manifest, but without graphs.
        named: Functions by name.
        wanted: Number of clients of the tier that a round aims for.
        table: Table ``simulation``, with device and precision.
    """

    bundle: BundleArchive
    named: Mapping[str, Function]
    wanted: int = 1
    table: SimulationTable = field(default_factory=SimulationTable)
    _recorded: dict[tuple[str, int], Recorded] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tier: TierTraining,
        exchange: Exchange,
        bundle: BundleArchive,
        wanted: int,
        table: SimulationTable,
    ) -> Functions:
        """Return the functions of ``exchange`` for ``tier``.

        Args:
            tier: The tier's training: its model and frozen units.
            exchange: Round trip of the algorithm, with its functions.
            bundle: Bundle with the manifest, but without graphs.
            wanted: Number of clients of the tier that a round aims for.
            table: Table ``simulation``, with device and precision.
        """
        manifest = bundle.manifest
        named = {function.name: function for function in exchange.algorithm.functions}
        named |= {
            chunk.graph: prefix.forward
            for chunk, prefix in zip(manifest.prefix, tier.prefix_of(exchange), strict=True)
        }
        features = features_of(manifest.data)
        return cls(bundle, named if features is None else named | {FEATURES: features}, wanted, table)

    @property
    def device(self) -> torch.device:
        """Device of all inputs and outputs."""
        return torch.device(self.table.device)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle."""
        return self.bundle.manifest

    def steps(self, rows: int, most: int) -> int:
        """Return the number of local steps of a client with ``rows`` samples. The client uses at most ``most`` samples;
        0: no limit.
        """
        return sum(self.manifest.steps_with(min(rows, most or rows)))

    def blob(self, ref: BlobRef) -> bytes:
        """Return the bytes of a blob of the bundle, such as the tokenizer."""
        return self.bundle.blobs[ref.sha256]

    def features(self, name: str) -> Callable[[Array], Array]:
        """Return a function that converts the contents of files to samples. It runs the recorded function called
        ``name`` on a batch of rows.
        """
        run = self.record_function(name, 1)
        return lambda rows: (
            run({"batch.0.x": torch.from_numpy(rows).to(self.device)})["record.x"].cpu().numpy()
        )

    @cached_property
    def together(self) -> int:
        """Number of clients for which a function is called at once. It exceeds 1 for small models without convolutions,
        where the calls cost more than the arithmetic.

        It depends on model and federation, but not on the machine.
        """
        apart = {chunk.graph for chunk in self.manifest.prefix}
        graphs = [each for each in self.manifest.of_round if each.name not in apart]
        held = sum(port.nbytes for port in self.manifest.graph(self.manifest.start).outputs_of("state"))
        groups = -(-self.wanted // _MOST_TOGETHER)
        size = -(-self.wanted // max(1, groups))
        if size < 2 or held > _SMALL_STATE or any(_convolves(self.named[each.name]) for each in graphs):
            return 1
        try:
            for each in graphs:
                self.record_function(each.name, size)
        except ConfigError:  # an op that vmap does not know
            return 1
        return size

    @cached_property
    def _steps(self) -> frozenset[str]:
        """Names of the functions of training steps, which run in the precision of the table ``simulation``.

        Functions at the begin and end of a round are exact.
        """
        phases = self.manifest.phases
        shorter = {bucket.graph for phase in phases for bucket in phase.shorter}
        return frozenset({phase.graph for phase in phases} | shorter)

    def record_function(self, name: str, clients: int) -> Recorded:
        """Return function ``name`` as recorded for ``clients`` clients at once. Recordings are cached.

        With 1 client the tensors have no client dimension.

        Raises:
            ConfigError: If an operation cannot run for several clients.
        """
        key = name, clients
        if key not in self._recorded:
            exact = name not in self._steps or self.table.precision == "float32"
            self._recorded[key] = record_function(self.named[name], clients, device=self.device, exact=exact)
        return self._recorded[key]


def record_function(
    function: Function, clients: int, *, device: torch.device = _HERE, exact: bool = True
) -> Recorded:
    """Record a function as a list of operations, and return a function that runs it without autograd.

    Args:
        function: Function of an algorithm.
        clients: Number of clients. Above 1, each tensor that differs per client has a leading client dimension.
        device: Device to run on.
        exact: False for matrix products in bfloat16, as with torch.autocast; weights stay float32.

    Returns:
        A function from input tensors to output tensors, both by port name. It overwrites an input of the role
        ``state``
        that an output replaces.

    Raises:
        ConfigError: If an operation cannot run for several clients.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact, cache_enabled=False):
        traced = trace(function)
    captured = decompose(traced, _AS_THEY_RAN)
    inputs, outputs, module = tuple(captured.inputs), tuple(captured.outputs), captured.module
    fold(module)
    fuse(module)
    if clients > 1:
        module = _for_many(function, inputs, module, clients)
        fold(module)
        fuse(module)
        is_turned = False
    else:
        pool_first(module)
        is_turned = channels_last(module, [role_of(name) in _IMAGES for name in inputs])
        large_first(module)
    if not is_turned and device.type == "cpu":
        pools_channels_last(module)
    own_results(module, [role_of(name) == "state" for name in outputs])
    in_place(module, _find_replaced(inputs, outputs))
    move(module, device)
    call = compile_list(module)

    def run(given: Mapping[str, Tensor]) -> Tensors:
        with torch.no_grad():
            results = call(*[given[name] for name in inputs])
        return dict(zip(outputs, results, strict=True))

    return run


def _convolves(function: Function) -> bool:
    """Return True if the function has convolutions. For several clients these become grouped ones, which are slower."""
    captured = capture(function, _AS_THEY_RAN)
    return any(node.target is torch.ops.aten.convolution.default for node in captured.module.graph.nodes)


def _find_replaced(inputs: Sequence[str], outputs: Sequence[str]) -> dict[int, int]:
    """Return, by index of each ``state`` input that the function replaces, the index of the output with the same name."""
    return {
        place: outputs.index(name)
        for place, name in enumerate(inputs)
        if role_of(name) == "state" and name in outputs
    }


def _for_many(
    function: Function, inputs: Sequence[str], module: torch.fx.GraphModule, clients: int
) -> torch.fx.GraphModule:
    """Return ``module`` with a leading client dimension on all tensors that differ per client.

    Raises:
        ConfigError: If an operation cannot run for several clients.
    """
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
            f"function {function.name!r} cannot run for {clients} clients together: {error}; set simulation.together = 1",
            function=function.name,
            clients=clients,
        ) from error


@dataclass(frozen=True)
class SimulationPlan:
    """Run specification of a server, and the functions that run instead of bundles.

    ``functions`` are by (tier, index of the exchange); an exchange is one round trip between server and device. The
    index is from :meth:`~edgefl_server.run_spec.RunSpec.index`.
    """

    spec: RunSpec
    functions: dict[tuple[str, int], Functions]

    @classmethod
    def of(
        cls,
        federation: Federation,
        dataset: Dataset,
        *,
        listener: EventListener | None = None,
        progress: Callable[[str], None] = lambda _: None,
        device: str = "auto",
    ) -> SimulationPlan:
        """Return the plan of ``federation``. No bundles are compiled.

        Args:
            federation: Configuration.
            dataset: Dataset whose test set the server evaluates on.
            listener: Receives events of the compilation, such as warnings.
            progress: Called with a line of text for each step.
            device: Device of the evaluation.

        Raises:
            ConfigError: If the configuration is invalid.
            ModelError: If the model cannot be divided into tiers.
            ExportError: If a tier cannot be compiled.
        """
        made: dict[str, dict[str, Functions]] = {}

        def outline(tier: TierTraining, exchange: Exchange, _format: str) -> BundleArchive:
            own = made.setdefault(exchange.name, {})
            if tier.name not in own:  # the same functions in every format
                bundle = outline_of(federation, dataset, tier, exchange, progress=progress)
                own[tier.name] = Functions.of(
                    tier, exchange, bundle, _wanted(federation, tier.name), federation.simulation
                )
            return own[tier.name].bundle

        spec = compose_with(federation, dataset, outline, listener=listener, device=device)
        functions = {
            (tier, index): each for index, own in enumerate(made.values()) for tier, each in own.items()
        }
        return cls(spec, functions)


def _wanted(federation: Federation, tier: str) -> int:
    """Return the number of clients of ``tier`` that a round aims for, if each tier is selected by the same fraction."""
    return share(federation.round.fraction, federation.tiers[tier].count)
