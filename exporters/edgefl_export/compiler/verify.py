"""Verification of a finished bundle: every graph, its ports, and the order in which a device runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgefl.contract.algorithm import Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.errors import BundleError, ExportError
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec, Port
from edgefl_export.compiler.compiler import target_of
from edgefl_export.compiler.manifest import batch_size, ports, trained_entries
from edgefl_export.compiler.request import CompileRequest
from edgefl_export.target import Target
from edgefl_export.verify.graphs import Verification


@dataclass(frozen=True)
class GraphCheck:
    """Result of the check of one graph.

    Attributes:
        graph: name of the graph.
        size: size of its model in bytes.
        problem: first difference from its function in torch; empty if they agree.
        report: comparison of the outputs; None if there is a problem.
    """

    graph: str
    size: int
    problem: str = ""
    report: Verification | None = None


@dataclass(frozen=True)
class BundleCheck:
    """Result of the check of a bundle; ``str()`` lists all problems.

    Attributes:
        graphs: results of its graphs.
        problems: differences between the manifest and the request, one text for each.
    """

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
    bundle: BundleArchive,
    request: CompileRequest,
    seed: int = 0,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> BundleCheck:
    """Compare every graph of a bundle with its function in torch, on random inputs.

    Args:
        bundle: the bundle, which need not be trusted; each graph runs in the runtime of its format.
        request: request with the functions to compare with. Its ``data`` are replaced by those of the bundle.
        seed: seed of the inputs.
        progress: called with the name of each graph before it runs.

    Raises:
        BundleError: if ``request`` has no function with the name of a graph. All other findings are in the result.
        ConfigError: if the runtime of a format is not installed.
    """
    request = replace(request, data=bundle.manifest.data)
    for graph in bundle.manifest.graphs:
        if graph.name not in request.functions:
            raise BundleError(
                f"expected a function for graph {graph.name!r}, found none: algorithm {request.algorithm.name!r} with "
                f"{len(request.prefix)} chunks has {', '.join(request.functions)}; name the federation file of this bundle",
                graph=graph.name,
            )
    targets = {name: target_of(name) for name in {graph.format for graph in bundle.manifest.graphs}}
    checks = []
    for graph in bundle.manifest.graphs:
        progress(graph.name)
        model, function = bundle.graph_bytes(graph.name), request.functions[graph.name]
        checks.append(_check(targets[graph.format], graph, model, function, seed))
    return BundleCheck(tuple(checks), tuple(_contradictions(bundle.manifest, request)))


def _check(target: Target, graph: Graph, model: bytes, function: Function, seed: int) -> GraphCheck:
    problem = _ports_differ(graph, function, seed) or target.port_mismatch(graph, model)
    if problem:
        return GraphCheck(graph.name, len(model), problem)
    try:
        report = target.verify_untrusted(function, model, seed, graph.in_place)
    except ExportError as error:
        return GraphCheck(graph.name, len(model), error.message)
    # The outputs of all graphs together would take as much memory as the model.
    return GraphCheck(graph.name, len(model), report=replace(report, found={}))


def _ports_differ(graph: Graph, function: Function, seed: int) -> str:
    """Return a text with the first difference between the ports of a manifest's graph and of its function, or "".

    A graph may leave out inputs that it does not read. Runs the function once to get its outputs.
    """
    declared = {port.name: _describe(port) for port in ports(function.inputs)}
    for port in graph.inputs:
        if port.name not in declared:
            return f"the graph reads {port.name!r}, which function {function.name!r} has not"
        if _describe(port) != declared[port.name]:
            return (
                f"input {port.name!r} is {_describe(port)} in the manifest and {declared[port.name]} in torch"
            )
    results: Tensors = function(function.example(seed))
    outputs = {port.name: _describe(port) for port in graph.outputs}
    specs = {name: TensorSpec.of(value) for name, value in results.items()}
    wanted = {port.name: _describe(port) for port in ports(specs)}
    if list(outputs) != list(wanted):
        return f"the graph's outputs are {', '.join(outputs)}; torch gives {', '.join(wanted)}"
    wrong = next((name for name in wanted if outputs[name] != wanted[name]), None)
    return (
        f"output {wrong!r} is {outputs[wrong]} in the manifest and {wanted[wrong]} in torch" if wrong else ""
    )


def _describe(port: Port) -> str:
    """Return a text with dtype and shape of a port, preceded by its role if the role does not follow from the port's
    name.
    """
    tensor_type = f"{port.dtype}{list(port.shape)}"
    return tensor_type if port.role == role_of(port.name) else f"{port.role} {tensor_type}"


def _repetitions(phase: Phase | PhaseSpec) -> int | str:
    """Return the number of steps of a phase, or a text for a phase that passes once over the data."""
    return "once over the data" if phase.over_data else phase.steps


def _contradictions(manifest: Manifest, request: CompileRequest) -> list[str]:
    """Return a text for every entry of the manifest that differs from the request."""
    algorithm = request.algorithm
    pairs = {
        "algorithm": (manifest.program, algorithm.name),
        "exchange": (manifest.exchange, request.exchange),
        "units of the frozen chunks": (
            [list(chunk.units) for chunk in manifest.prefix],
            [list(chunk.units) for chunk in request.prefix],
        ),
        "graphs of the frozen chunks": (
            [chunk.graph for chunk in manifest.prefix],
            [f"forward.{number}" for number in range(1, len(request.prefix) + 1)],
        ),
        "trained units": (list(manifest.suffix), list(request.units)),
        "start, finish and evaluate": (
            [manifest.start, manifest.finish, manifest.evaluate],
            [algorithm.start.name, algorithm.finish.name, algorithm.evaluate.name],
        ),
        "phases": (
            [(phase.name, phase.graph, _repetitions(phase)) for phase in manifest.phases],
            [(phase.name, phase.function.name, _repetitions(phase)) for phase in algorithm.phases],
        ),
        "personalize": (manifest.personalize, algorithm.personalize.name if algorithm.personalize else ""),
        "draws": (manifest.draws, algorithm.draws),
        "carry is good for exchanges (0: all)": (manifest.carry_exchanges, algorithm.carry_rule.exchanges),
        "carry is needed": (manifest.carry_needed, algorithm.carry_rule.needed),
        "carry of any tier": (manifest.carry_any_tier is True, algorithm.carry_rule.any_tier),
        "batch": (manifest.batch, batch_size(algorithm)),
        "trained parameters": (manifest.parameters, trained_entries(algorithm)),
        "hyper-parameters": (dict(manifest.hyper), dict(algorithm.hyper)),
        "graphs": (sorted(graph.name for graph in manifest.graphs), sorted(request.functions)),
    }
    return [
        f"{what}: {entry} in the bundle, {wanted} expected"
        for what, (entry, wanted) in pairs.items()
        if entry != wanted
    ]
