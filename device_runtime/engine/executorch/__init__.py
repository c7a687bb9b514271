"""ExecuTorch without torch: programs (``.pte``) run on numpy arrays that are passed by their address."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

from device_runtime.engine.base import Outputs, State
from device_runtime.engine.executorch.binding import Native, NativeError, Program, Value
from device_runtime.engine.executorch.buffers import checked, new_buffer, owned_copy, readable
from device_runtime.engine.executorch.build import Wheel, find_wheel
from device_runtime.libraries import sparing_code
from edgefl.wire.blobs import verified
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.errors import BundleError, ConfigError
from edgefl.wire.tensors import Array, Arrays


class ExecuTorchEngine:
    """Runs ``executorch`` graphs on the CPU with ``threads`` threads, one number for the process.

    ConfigError if executorch is not installed, or its binding is neither there nor can be compiled, or it cannot
    have so many threads.
    """

    name = "executorch"
    format = "executorch"

    def __init__(self, threads: int = 1) -> None:
        wheel = find_wheel()
        self.version = wheel.version
        self._native = _native(wheel)
        self.thread_counts = (threads,)
        try:
            self._native.set_threads(threads)
        except NativeError as error:
            raise ConfigError(
                f"executorch {self.version} cannot work with {threads} threads: {error}; choose others by `threads`",
                threads=threads,
            ) from error

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> ExecuTorchGraph:
        """``threads`` are those of the process: :attr:`thread_counts` has one number."""
        if graph.segments:
            raise BundleError(
                f"graph {graph.name!r} is in segments, which the executorch engine does not run: export it with a larger "
                "memory budget, or use `engine` onnx",
                graph=graph.name,
            )
        if not graph.blob.codec:  # else the digest is that of the packed bytes
            # The released runtime follows a program's offsets unchecked: damaged bytes can end the process.
            verified(graph.blob, artifact)
        try:
            with sparing_code(release=graph.is_repeated):
                program = Program(self._native, artifact)
                _check_ports(graph, program.inputs(), program.outputs())
                _check_arena(graph, program.planned_bytes)
                program.prepare()
        except NativeError as error:
            raise BundleError(
                f"executorch {self.version} cannot load graph {graph.name!r}: {error}; export the bundle for this version",
                graph=graph.name,
            ) from error
        return ExecuTorchGraph(graph, program)

    def read_state(self, state: State) -> Arrays:
        return dict(state)

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        return {name: owned_copy(array) for name, array in arrays.items()}


class ExecuTorchGraph:
    """One program and its manifest entry. Values are matched by position, as a program names none.

    State is arrays of the engine's own. What the manifest lists as ``in_place`` is written where it was read; other state
    that the graph rewrites moves between two sets of buffers, one read and one written in turn. Outputs that the program
    planned are copied out of its arena when the call is over.
    """

    def __init__(self, graph: Graph, program: Program) -> None:
        self._graph = graph
        self._program = program
        self._spare: State = {}

    @property
    def planned_bytes(self) -> int:
        """The arena that was planned at export, which the engine holds while the graph is loaded."""
        return self._program.planned_bytes

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        graph = self._graph
        # Held until the call is over: the program has only their addresses.
        sources = [
            checked(state[port.name], port, graph.name)
            if port.role == "state"
            else readable(checked(feeds[port.name], port, graph.name))
            for port in graph.inputs
        ]
        read = {port.name: array for port, array in zip(graph.inputs, sources, strict=True)}
        targets = [self._target(port, read) for port in graph.outputs]
        try:
            self._call([array.ctypes.data for array in sources], [array.ctypes.data for array in targets])
        except NativeError as error:
            raise BundleError(
                f"executorch cannot run graph {graph.name!r}: {error}; export the bundle again",
                graph=graph.name,
            ) from error
        made = {port.name: array for port, array in zip(graph.outputs, targets, strict=True)}
        later_state = {port.name: made.pop(port.name) for port in graph.outputs_of("state")}
        self._spare = {
            name: read[name] for name in later_state if name in read and later_state[name] is not read[name]
        }
        return Outputs(later_state, made)

    def _call(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self._program.run(inputs, outputs)

    def _target(self, port: Port, read: State) -> Array:
        if port.role == "state" and port.name in self._graph.in_place:
            return read[port.name]  # type: ignore[no-any-return]
        spare: Array | None = self._spare.pop(port.name, None)
        # Whoever calls again with state that was used up must not have it written while it is read.
        if (
            spare is None
            or spare is read[port.name]
            or (spare.dtype.name, spare.shape) != (port.dtype, port.shape)
        ):
            return new_buffer(port)
        return spare


@functools.cache
def _native(wheel: Wheel) -> Native:
    return Native(wheel, lambda text: print(text, file=sys.stderr, flush=True))


def _check_ports(graph: Graph, inputs: list[Value], outputs: list[Value]) -> None:
    planned = graph.planned_outputs
    wrong = [
        *_wrong("inputs", graph.inputs, inputs, planned=False),
        *_wrong("outputs", graph.outputs, outputs, planned=planned),
    ]
    if wrong:
        listed = "; ".join(wrong[:5])
        raise BundleError(
            f"graph {graph.name!r} and its manifest disagree on {listed}: export the bundle again",
            graph=graph.name,
        )


def _check_arena(graph: Graph, planned: int) -> None:
    """The device took the bundle for what its manifest says: no program may allocate more than that."""
    if graph.planned_bytes and planned > graph.planned_bytes:
        raise BundleError(
            f"graph {graph.name!r} is listed with {graph.planned_bytes} bytes, and its program plans {planned}: export the "
            "bundle again",
            graph=graph.name,
            planned_bytes=planned,
        )


def _wrong(kind: str, ports: tuple[Port, ...], values: list[Value], *, planned: bool) -> list[str]:
    """What a program says of its values where it contradicts the manifest, or cannot be given memory for them."""
    if len(ports) != len(values):
        return [f"{len(ports)} {kind} listed, {len(values)} in the program"]
    problems = [
        f"{port.name}: {port.dtype} {port.shape} listed, {value.dtype} {value.shape} in the program"
        for port, value in zip(ports, values, strict=True)
        if (port.dtype, port.shape) != (value.dtype, value.shape)
    ]
    for port, value in zip(ports, values, strict=True):
        if value.planned != planned:
            where = "memory that the program planned itself", "the caller's memory"
            problems.append(f"{port.name}: it is in {where[planned]}")
        if value.permuted:
            problems.append(f"{port.name}: it is not in row order")
    return problems
