"""A finished bundle beside torch: every graph, its ports, and the order in which a device runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.errors import BundleError, ExportError
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec, Port
from edgefl_export.bundle.build import Prefix, batch_size, ports, trained_entries
from edgefl_export.bundle.features import features_of
from edgefl_export.bundle.formats import Format, format_of
from edgefl_export.verify.graphs import Verification


@dataclass(frozen=True)
class Origin:
    """What a bundle claims to be made from: the algorithm, the frozen prefix and the names of the trained units.

    ``exchange`` is what people call the one of a method's exchanges that ``algorithm`` is, "" the main one.
    """

    algorithm: Algorithm
    prefix: Sequence[Prefix]
    suffix: tuple[str, ...]
    exchange: str = ""

    @property
    def functions(self) -> Mapping[str, Function]:
        """The functions by the name of their graph."""
        chunks = {f"forward.{number}": chunk.forward for number, chunk in enumerate(self.prefix, 1)}
        return chunks | {function.name: function for function in self.algorithm.functions}


@dataclass(frozen=True)
class GraphCheck:
    """One graph beside its function. ``problem`` is empty where they agree; ``report`` is there if it could run."""

    graph: str
    size: int
    problem: str = ""
    report: Verification | None = None


@dataclass(frozen=True)
class BundleCheck:
    """``problems`` are contradictions between the manifest and its origin; those of a graph stand with the graph."""

    graphs: tuple[GraphCheck, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not any(check.problem for check in self.graphs)

    def __str__(self) -> str:
        wrong = (
            *self.problems,
            *(f"graph {check.graph}: {check.problem}" for check in self.graphs if check.problem),
        )
        return "\n".join(wrong) or f"all {len(self.graphs)} graphs agree with torch"


def verify_bundle(
    bundle: Bundle, origin: Origin, seed: int = 0, *, progress: Callable[[str], None] = lambda _: None
) -> BundleCheck:
    """Compare every graph of ``bundle`` with its function in torch, on random inputs by ``seed``.

    Each graph runs in the runtime of its format; ConfigError if that is not installed. Raises BundleError for a graph
    that no function of ``origin`` stands behind; all other findings are in the result.
    """
    functions = functions_of(bundle.manifest, origin)
    for graph in bundle.manifest.graphs:
        if graph.name not in functions:
            raise BundleError(
                f"no function stands behind graph {graph.name!r}: algorithm {origin.algorithm.name!r} with "
                f"{len(origin.prefix)} chunks has {', '.join(functions)}; name the federation file of this bundle",
                graph=graph.name,
            )
    formats = {name: format_of(name) for name in {graph.format for graph in bundle.manifest.graphs}}
    checks = []
    for graph in bundle.manifest.graphs:
        progress(graph.name)
        model = bundle.graph_bytes(graph.name)
        checks.append(_check(formats[graph.format], graph, model, functions[graph.name], seed))
    return BundleCheck(tuple(checks), tuple(_contradictions(bundle.manifest, origin)))


def functions_of(manifest: Manifest, origin: Origin) -> Mapping[str, Function]:
    """The functions by the name of their graph, and the one that makes samples, which the manifest describes itself."""
    made = features_of(manifest.data)
    return {**origin.functions, **({made.name: made} if made else {})}


def _check(form: Format, graph: Graph, model: bytes, function: Function, seed: int) -> GraphCheck:
    problem = _ports_differ(graph, function, seed) or form.differs(graph, model)
    if problem:
        return GraphCheck(graph.name, len(model), problem)
    try:
        report = form.verify_again(function, model, seed, graph.in_place)
        return GraphCheck(
            graph.name, len(model), report=replace(report, found={})
        )  # which all graphs' would add up
    except ExportError as error:
        return GraphCheck(graph.name, len(model), error.message)


def _ports_differ(graph: Graph, function: Function, seed: int) -> str:
    """The first port on which manifest and function disagree. A graph may leave out inputs that it does not need."""
    declared = {port.name: _told(port) for port in ports(function.inputs)}
    for port in graph.inputs:
        if port.name not in declared:
            return f"the graph reads {port.name!r}, which function {function.name!r} has not"
        if _told(port) != declared[port.name]:
            return f"input {port.name!r} is {_told(port)} in the manifest and {declared[port.name]} in torch"
    results: Tensors = function(function.example(seed))
    outputs = {port.name: _told(port) for port in graph.outputs}
    specs = {name: TensorSpec.of(value) for name, value in results.items()}
    wanted = {port.name: _told(port) for port in ports(specs)}
    if list(outputs) != list(wanted):
        return f"the graph's outputs are {', '.join(outputs)}; torch gives {', '.join(wanted)}"
    wrong = next((name for name in wanted if outputs[name] != wanted[name]), None)
    return (
        f"output {wrong!r} is {outputs[wrong]} in the manifest and {wanted[wrong]} in torch" if wrong else ""
    )


def _told(port: Port) -> str:
    """Role, type and shape, the role only where the name does not tell it."""
    tensor_type = f"{port.dtype}{list(port.shape)}"
    return tensor_type if port.role == role_of(port.name) else f"{port.role} {tensor_type}"


def _repeated(phase: Phase | PhaseSpec) -> int | str:
    """How often a device runs a phase's step; in a pass over the data, that is up to the data."""
    return "once over the data" if phase.over_data else phase.steps


def _contradictions(manifest: Manifest, origin: Origin) -> list[str]:
    """What a device would do differently from what ``origin`` says."""
    algorithm = origin.algorithm
    pairs = {
        "algorithm": (manifest.program, algorithm.name),
        "exchange": (manifest.exchange, origin.exchange),
        "units of the frozen chunks": (
            [list(chunk.units) for chunk in manifest.prefix],
            [list(chunk.units) for chunk in origin.prefix],
        ),
        "graphs of the frozen chunks": (
            [chunk.graph for chunk in manifest.prefix],
            [f"forward.{number}" for number in range(1, len(origin.prefix) + 1)],
        ),
        "trained units": (list(manifest.suffix), list(origin.suffix)),
        "start, finish and evaluate": (
            [manifest.start, manifest.finish, manifest.evaluate],
            [algorithm.start.name, algorithm.finish.name, algorithm.evaluate.name],
        ),
        "phases": (
            [(phase.name, phase.graph, _repeated(phase)) for phase in manifest.phases],
            [(phase.name, phase.function.name, _repeated(phase)) for phase in algorithm.phases],
        ),
        "personalize": (manifest.personalize, algorithm.personalize.name if algorithm.personalize else ""),
        "draws": (manifest.draws, algorithm.draws),
        "carry is good for exchanges (0: all)": (manifest.carry_exchanges, algorithm.carry_rule.exchanges),
        "carry is needed": (manifest.carry_needed, algorithm.carry_rule.needed),
        "batch": (manifest.batch, batch_size(algorithm)),
        "trained parameters": (manifest.parameters, trained_entries(algorithm)),
        "hyper-parameters": (dict(manifest.hyper), dict(algorithm.hyper)),
        "graphs": (sorted(graph.name for graph in manifest.graphs), sorted(functions_of(manifest, origin))),
    }
    return [
        f"{what}: {entry} in the bundle, {wanted} expected"
        for what, (entry, wanted) in pairs.items()
        if entry != wanted
    ]
