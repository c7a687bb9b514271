"""Whether the graphs of a manifest fit together: what one reads, an earlier one left behind."""

from __future__ import annotations

from itertools import pairwise

from edgefl.wire.errors import ExportError
from edgefl.wire.manifest import Graph, Manifest, Port


def check_wiring(manifest: Manifest) -> None:
    """Raise ExportError if a device that follows ``manifest`` would lack a tensor or feed one of a wrong shape."""
    steps = [manifest.graph(phase.graph) for phase in manifest.phases]
    _check_state([manifest.graph(manifest.start), *steps, manifest.graph(manifest.finish)])
    _check_hyper(manifest)
    _check_record([manifest.graph(chunk.graph) for chunk in manifest.prefix], steps)


def _check_state(graphs: list[Graph]) -> None:
    state: dict[str, Port] = {}
    for graph in graphs:
        for port in graph.inputs_of("state"):
            if state.get(port.name) != port:
                left = _shown(state.get(port.name))
                raise ExportError(
                    f"function {graph.name!r} reads {port.name!r} as {_shown(port)}, the functions before it leave "
                    f"{left}; return it from them",
                    function=graph.name,
                    port=port.name,
                )
        state |= {port.name: port for port in graph.outputs_of("state")}


def _check_hyper(manifest: Manifest) -> None:
    read = {port.label for graph in manifest.graphs for port in graph.inputs_of("hyper")}
    if missing := sorted(read - set(manifest.hyper)):
        raise ExportError(
            f"program {manifest.program!r} reads {missing} but gives no default; list them in Program.hyper",
            program=manifest.program,
            hyper=missing,
        )


def _check_record(chunks: list[Graph], steps: list[Graph]) -> None:
    """A chunk leaves one row per row it reads; rows are what the next chunk, and at last the steps, read."""
    for writer, reader in pairwise([*chunks, *steps[:1]] if chunks else []):
        left = next(iter(writer.outputs_of("record")), None)
        read = next((port for port in reader.inputs_of("batch") if port.label == "0.x"), None)
        if left is None or (read and (left.dtype, left.shape[1:]) != (read.dtype, read.shape[1:])):
            raise ExportError(
                f"chunk {writer.name!r} records {_shown(left)}, {reader.name!r} reads {_shown(read)}; cut the model "
                "at the same place for both",
                writer=writer.name,
                reader=reader.name,
            )


def _shown(port: Port | None) -> str:
    return "nothing of that name" if port is None else f"{port.dtype}{list(port.shape)}"
