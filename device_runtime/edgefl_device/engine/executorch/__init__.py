"""ExecuTorch without torch: runs programs (``.pte``) on numpy arrays, which are passed by address."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

from edgefl.errors import BundleError, ConfigError
from edgefl.wire.blobs import verify_blob
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Outputs, State
from edgefl_device.engine.executorch.build import ExecuTorchWheel, find_wheel
from edgefl_device.engine.executorch.program import (
    NativeError,
    NativeLibraries,
    NativeProgram,
    ValueLocation,
    checked,
    new_buffer,
    owned_copy,
    places,
    readable,
)


class ExecuTorchEngine:
    """Engine of ``executorch`` graphs on the CPU. All graphs of the process share one pool of ``threads`` threads.

    Raises:
        ConfigError: executorch is not installed, its binding cannot be compiled, or the number of threads is not
            possible.
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
        """Load a program. ``threads`` is ignored: all programs share one pool of :attr:`thread_counts`.

        Args:
            graph: The manifest's entry of the graph.
            artifact: The program's bytes, decompressed.
            threads: Ignored.

        Raises:
            BundleError: The bytes are damaged, the ports or the planned memory differ from the manifest, or the graph
                is in segments.
        """
        if graph.segments:
            raise BundleError(
                f"graph {graph.name!r} is in segments, which the executorch engine does not run: export it with a larger "
                "memory budget, or use `engine` onnx",
                graph=graph.name,
            )
        _check_bytes(graph, artifact)
        try:
            program = NativeProgram(self._native, artifact)
            inputs, outputs = places(graph, program.inputs(), program.outputs())
            _check_arena(graph, program.planned_bytes)
            program.prepare()
        except NativeError as error:
            raise BundleError(
                f"executorch {self.version} cannot load graph {graph.name!r}: {error}; export the bundle for this version",
                graph=graph.name,
            ) from error
        return ExecuTorchGraph(graph, program, inputs, outputs)

    def read_state(self, state: State) -> Arrays:
        return dict(state)

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        return {name: owned_copy(array) for name, array in arrays.items()}


class ExecuTorchGraph:
    """A loaded program, and the port that each of its inputs and outputs stands for.

    The engine owns the arrays of state. Ports in ``in_place`` are written where they were read. Other state that the
    graph rewrites alternates between two sets of buffers: one is read, the other written. Outputs in the program's
    own memory are copied when the call is over.
    """

    def __init__(
        self,
        graph: Graph,
        program: NativeProgram,
        inputs: Sequence[ValueLocation],
        outputs: Sequence[ValueLocation],
    ) -> None:
        self._graph = graph
        self._program = program
        self._inputs, self._outputs = inputs, outputs
        self._spare: State = {}

    @property
    def planned_bytes(self) -> int:
        """Bytes of the arena that was planned at export; the engine holds it while the graph is loaded."""
        return self._program.planned_bytes

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        graph = self._graph
        # Held until the call is over: the program has only their addresses.
        read = {
            port.name: checked(state[port.name], port, graph.name)
            if port.role == "state"
            else readable(checked(feeds[port.name], port, graph.name))
            for port in graph.inputs
        }
        made = {port.name: self._target(port, read) for port in graph.outputs}
        try:
            self._call(
                [place.address(read) for place in self._inputs],
                [place.address(made) for place in self._outputs],
            )
        except NativeError as error:
            raise BundleError(
                f"executorch cannot run graph {graph.name!r}: {error}; export the bundle again",
                graph=graph.name,
            ) from error
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
def _native(wheel: ExecuTorchWheel) -> NativeLibraries:
    return NativeLibraries(wheel)


def _check_bytes(graph: Graph, artifact: bytes) -> None:
    """Raise BundleError for damaged bytes: the released runtime follows a program's offsets unchecked and would crash."""
    if any(variant.raw == len(artifact) for variant in graph.variants):
        digest = hashlib.sha256(artifact).hexdigest()
        if any(variant.sha256 == digest for variant in graph.variants):
            return
    if not graph.blob.codec:  # else the digest belongs to the packed bytes
        verify_blob(graph.blob, artifact)


def _check_arena(graph: Graph, planned: int) -> None:
    """Raise BundleError if a program allocates more (``planned`` bytes) than its manifest lists, which is what the
    device agreed to.
    """
    if graph.planned_bytes and planned > graph.planned_bytes:
        raise BundleError(
            f"graph {graph.name!r} is listed with {graph.planned_bytes} bytes, and its program plans {planned}: export the "
            "bundle again",
            graph=graph.name,
            planned_bytes=planned,
        )
