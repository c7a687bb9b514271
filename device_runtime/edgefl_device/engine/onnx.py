"""Engine of stock ONNX Runtime. State is bound to memory instead of copied through Python between steps.

A graph may be in segments: artifacts that run one after another as one graph. Values between them are on disk.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import onnxruntime as ort

from edgefl.errors import BundleError, StoreError
from edgefl.system.files import reserve_room
from edgefl.system.sizes import size
from edgefl.wire.bundle.graphs import Graph, RowRange, cover, parse_rows, split
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Outputs, State

# Values of a training step that wait on the disk: written and read as memory, and in no process's memory between.
#
# A page lies in one file for each loaded graph, which has no name from the beginning: whatever ends the process, nothing
# stays. A writer writes into a mapping of the file and a reader reads one, so nothing is copied; once a mapping is let go
# of, its bytes are the system's, which keeps them as long as it has room and writes them out otherwise.

SMALL_BYTES = 1 << 16
"""Values below this stay in memory: there are many, and together they are little."""
_SLACK = 64
"""Engines may read so far beyond the end of an input, and want its beginning at a multiple of this."""


class PageFile:
    """Memory on disk for the values that one segment of a graph passes to a later one; small values stay in memory.

    It is a file in ``folder`` (None: the system's folder for temporary files), reserved for all of ``ports`` at once.

    Raises:
        StoreError: The disk has no room for the values.
    """

    def __init__(self, ports: Iterable[Port], folder: Path | None) -> None:
        ports = list(ports)
        self._small: Arrays = {
            port.name: np.empty(port.shape, port.dtype) for port in ports if port.nbytes < SMALL_BYTES
        }
        self._places: dict[str, int] = {}
        self.nbytes = 0
        for port in ports:
            if port.name not in self._small:
                self._places[port.name] = self.nbytes
                self.nbytes += _mapped_bytes(port)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the graph that it belongs to
            if self.nbytes:
                reserve_room(self._file, self.nbytes)
        except OSError as error:
            raise StoreError(
                f"no room for {size(self.nbytes)} that a training step keeps in {folder or tempfile.gettempdir()} "
                f"({error.strerror}): free some space, or put the store elsewhere",
                needed=self.nbytes,
            ) from error

    def room(self, port: Port) -> Array:
        """Return writable mapped memory for the value of ``port``; its pages go to disk once the array is released."""
        return self._array(port, mmap.ACCESS_WRITE)

    def value(self, port: Port) -> Array:
        """Return the last written value of ``port``, mapped read-only."""
        return self._array(port, mmap.ACCESS_READ)

    def _array(self, port: Port, access: int) -> Array:
        if port.name in self._small:
            return self._small[port.name]
        room = mmap.mmap(
            self._file.fileno(), _mapped_bytes(port), access=access, offset=self._places[port.name]
        )
        entries = np.frombuffer(
            room, port.dtype, port.nbytes // np.dtype(port.dtype).itemsize, _leading_bytes(port)
        )
        return entries.reshape(port.shape)


def _leading_bytes(port: Port) -> int:
    """Return the number of unused bytes in the mapped file before a value of ``port``.

    They leave enough room between the value and the end of its last page for kernels that read beyond its end.
    """
    return _SLACK if -port.nbytes % mmap.PAGESIZE < _SLACK else 0


def _mapped_bytes(port: Port) -> int:
    """Return the size in bytes of the mapped file for ``port``, a multiple of the granularity of mappings."""
    whole = _leading_bytes(port) + port.nbytes + _SLACK
    return -(-whole // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class LoadedSegment(Protocol):
    """Interface of a loaded segment, which writes some outputs into memory of the caller."""

    def run_into(self, feeds: Mapping[str, Array], state: State, rooms: Mapping[str, Array]) -> Outputs:
        """Run once like :meth:`edgefl_device.engine.base.LoadedGraph.run`.

        Args:
            feeds: All inputs but state, by port name.
            state: State by port name.
            rooms: Memory for outputs by port name; these outputs are written there and are not in the result.
        """


class SegmentedGraph:
    """Loaded graph in segments: artifacts that run one after another as one graph, with the values between them on
    disk.

    All segments read the state from the beginning of the step.
    """

    def __init__(self, parts: Sequence[tuple[Graph, LoadedSegment]], pages: PageFile) -> None:
        self._parts = parts
        self._pages = pages

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        later_state: State = {}
        arrays: Arrays = {}
        for graph, loaded in self._parts:
            read = {port.name: self._pages.value(port) for port in graph.inputs_of("page")}
            rooms = {port.name: self._pages.room(port) for port in graph.outputs_of("page")}
            outputs = loaded.run_into({**feeds, **read}, state, rooms)
            del read, rooms
            later_state |= outputs.state
            arrays |= outputs.arrays
        return Outputs(later_state, arrays)


def load_segments(
    graph: Graph, artifact: bytes, folder: Path | None, load: Callable[[Graph, bytes], LoadedSegment]
) -> SegmentedGraph:
    """Load the segments of ``graph``, which run one after another.

    Args:
        graph: The manifest's entry of the graph.
        artifact: The bytes of all segments.
        folder: Folder for values between segments; None: the system's folder for temporary files.
        load: Function that loads one segment.

    Raises:
        BundleError: The blob has another number of segments than the manifest.
    """
    artifacts = split(artifact)
    if len(artifacts) != len(graph.segments):
        raise BundleError(
            f"graph {graph.name!r} has {len(graph.segments)} segments in its manifest and {len(artifacts)} in its blob; "
            "export the bundle again",
            graph=graph.name,
            segments=len(artifacts),
        )
    parts = []
    for segment, model in zip(graph.segments, artifacts, strict=True):
        part = msgspec.structs.replace(
            graph, inputs=segment.inputs, outputs=segment.outputs, in_place=segment.in_place, segments=()
        )
        parts.append((part, load(part, model)))
    made = [port for segment in graph.segments for port in segment.outputs if port.role == "page"]
    return SegmentedGraph(parts, PageFile(made, folder))


_DEVICE = "cpu"
_LOCATION = b"location"
_KEY_BEFORE = re.compile(
    rb"(?:\x0a|\x8a[\x80-\xff]{0,8}[\x00-\x7f])(?:\x08|\x88[\x80-\xff]{0,8}[\x00-\x7f])\Z"
)
_MOST_BEFORE = 20
_DTYPES = {"float": "float32", "double": "float64"}


class OnnxEngine:
    """Engine of ``onnx`` graphs on the CPU.

    Args:
        threads: Threads of each operator, unless a graph is loaded with another number.
        pages: Folder for values between segments; None: the system's folder for temporary files.
    """

    name = "onnxruntime"
    format = "onnx"

    def __init__(self, threads: int = 1, pages: Path | None = None, most_threads: int = 0) -> None:
        self.version = str(ort.__version__)
        self._threads, self._most_threads = threads, max(threads, most_threads)
        self._pages = pages
        _renew_arena()

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads that a graph can be loaded with: powers of two, and the largest allowed number.

        Each session has threads of its own.
        """
        return (
            *itertools.takewhile(self._most_threads.__gt__, (1 << power for power in itertools.count())),
            self._most_threads,
        )

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> OnnxGraph | SegmentedGraph:
        options = self._options(threads)
        if _renew_arena(graph) or graph.segments:
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            if not graph.segments:
                return self._loaded(graph, artifact, options)
            load = functools.partial(self._loaded, options=options, shrinks=True)
            return load_segments(graph, artifact, self._pages, load)
        finally:
            _renew_arena()  # so that the arena ends with the graph

    def _loaded(self, graph: Graph, artifact: bytes, options: Any, shrinks: bool = False) -> OnnxGraph:
        if _names_file(artifact):  # versions of onnxruntime open it
            raise BundleError(
                f"graph {graph.name!r} reads numbers from a file of this device, which no bundle may: export it again with "
                "its tensors inside",
                graph=graph.name,
            )
        try:
            session = ort.InferenceSession(artifact, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            raise BundleError(
                f"onnxruntime {self.version} cannot load graph {graph.name!r}: {error}; export the bundle for this version",
                graph=graph.name,
                error=str(error),
            ) from error
        return OnnxGraph(graph, session, shrinks=shrinks)

    def _options(self, threads: int = 0) -> Any:
        options = ort.SessionOptions()
        # By their first bytes, graphs would be read in a format of onnxruntime's own, too.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        options.intra_op_num_threads = threads or self._threads
        options.inter_op_num_threads = 1
        # The plan that lets a later value take a dead one's block keeps the block until then; the arena does better.
        options.enable_mem_reuse = False
        # The pattern planned from the first run would be one more block beside what that run took.
        options.enable_mem_pattern = False
        options.log_severity_level = (
            4  # what fails is raised, too: said on standard error it would come twice
        )
        return options

    def read_state(self, state: State) -> Arrays:
        return {name: value.numpy() for name, value in state.items()}

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        """Return a state with copies of ``arrays``, because a graph may overwrite its state."""
        state: State = {}
        for name, array in arrays.items():
            state[name] = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, _DEVICE)
            state[name].update_inplace(np.ascontiguousarray(array))
        return state


class OnnxGraph:
    """A session and its manifest entry. Outputs are matched by position, as ONNX allows no name for both input and
    output.

    State in ``Graph.in_place`` is written into the memory that it is read from. Other state that the graph rewrites
    alternates between two sets of buffers: one is read, the other written. New outputs from the arena each step would
    fragment it. Parts of large state may be ports of rows (:mod:`edgefl.wire.bundle.graphs`), which are bound to
    addresses inside the whole.
    """

    def __init__(self, graph: Graph, session: Any, *, shrinks: bool = False) -> None:
        self._graph = graph
        self._run_options = _shrinking() if shrinks else None
        self._session = session
        self._last: State = {}
        self._spare: State = {}
        inputs, outputs = list(session.get_inputs()), _by_port(session.get_outputs())
        ports = {port.name: port for port in graph.inputs}
        names = [rows.whole if (rows := parse_rows(arg.name)) else arg.name for arg in inputs]
        wrong = sorted({*names} ^ ports.keys())
        self._inputs = [(ports[name], arg) for name, arg in zip(names, inputs, strict=True) if name in ports]
        self._outputs = list(zip(graph.outputs, outputs, strict=False))
        wrong += [_differs(port, arg) for port, arg in self._inputs]
        wrong += [text for port, args in self._outputs for text in _outputs_differ(port, args)]
        if len(outputs) != len(graph.outputs):
            wrong.append(f"{len(outputs)} outputs instead of {len(graph.outputs)}")
        if any(wrong):
            listed = "; ".join([text for text in wrong if text][:5])
            raise BundleError(
                f"graph {graph.name!r} and its manifest disagree on {listed}: export the bundle again"
            )

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        return self.run_into(feeds, state, {})

    def run_into(self, feeds: Mapping[str, Array], state: State, rooms: Mapping[str, Array]) -> Outputs:
        """Run once, and write the outputs named in ``rooms`` into the given memory.

        Args:
            feeds: All inputs but state, by port name.
            state: State by port name.
            rooms: Memory for outputs by port name.

        Returns:
            The new state, and the outputs that are not in ``rooms``.
        """
        in_place = {name: state[name] for name in self._graph.in_place}
        later_state = {
            port.name: in_place.get(port.name) or self._buffer(port)
            for port in self._graph.outputs_of("state")
        }
        # In the arena, an output that is still read when the next run begins would leave a gap that stays.
        arrays = {
            port.name: np.empty(port.shape, port.dtype)
            for port in self._graph.outputs
            if port.role != "state" and port.name not in rooms
        }
        bound = {**rooms, **arrays}
        binding = self._session.io_binding()
        for port, arg in self._inputs:
            if port.role != "state":
                binding.bind_cpu_input(port.name, np.asarray(feeds[port.name], order="C"))
            elif rows := parse_rows(arg.name):
                binding.bind_input(arg.name, *_place(state[port.name], port, rows, arg.shape))
            else:
                binding.bind_ortvalue_input(port.name, state[port.name])
        for port, args in self._outputs:
            for arg in args:
                if port.role == "state" and (rows := parse_rows(arg.name)):
                    binding.bind_output(arg.name, *_place(later_state[port.name], port, rows, arg.shape))
                elif port.role == "state":
                    binding.bind_ortvalue_output(arg.name, later_state[port.name])
                else:
                    room = bound[port.name]
                    binding.bind_output(arg.name, _DEVICE, 0, room.dtype.type, room.shape, room.ctypes.data)
        self._session.run_with_iobinding(binding, self._run_options)
        # What it gave out keeps the binding, and the binding would keep the state that was read.
        binding.clear_binding_inputs()
        # Only what this graph made itself: the first state may be read again, by another graph.
        read = {name: value for name, value in self._last.items() if state.get(name) is value}
        self._spare = {name: value for name, value in read.items() if name not in in_place}
        self._last = later_state
        return Outputs(later_state, arrays)

    def _buffer(self, port: Port) -> Any:
        if port.name in self._spare:
            return self._spare.pop(port.name)
        return ort.OrtValue.ortvalue_from_shape_and_type(port.shape, np.dtype(port.dtype), _DEVICE)


def _names_file(artifact: bytes) -> bool:
    """Return True if a tensor anywhere in a serialized model may store its numbers in an external file.

    Such a tensor has a field 1 with the string ``location``. In protobuf the string's bytes are contiguous, preceded
    by its length (8) and by the field's number and type (10). Both are varints of one to ten bytes, with seven bits
    in each, lowest first. This function looks for all encodings of the two and for some with other meanings. It
    therefore misses nothing that a parser accepts, even in unknown fields, and may refuse another field 1 with that
    text.
    """
    at = artifact.find(_LOCATION)
    while at >= 0:
        if _KEY_BEFORE.search(artifact[max(0, at - _MOST_BEFORE) : at]):
            return True
        at = artifact.find(_LOCATION, at + 1)
    return False


def _renew_arena(graph: Graph | None = None) -> bool:
    """Register an empty arena for the sessions that are created next.

    Sessions keep their arena, so a new registration gives each graph an arena of its own, which ends with the graph.
    Segments share one: otherwise a segment could not use the memory that the one before it has freed. onnxruntime's
    default arena doubles block by block, and ``RLIMIT_DATA`` counts the addresses that it does not use.

    Args:
        graph: Graph whose ``arena_bytes`` become one block. Without a known size, or for segments, which return
            all blocks after each run, the arena grows with each request.

    Returns:
        False if this release of onnxruntime keeps the first arena that a process registers.
    """
    size = min(graph.arena_bytes, graph.planned_bytes, 2**31 - 1) if graph and not graph.segments else 0
    settings = {
        # Bytes that a block may be larger than a request of more than half of it: the arena has fewer gaps.
        "max_dead_bytes_per_chunk": 4096,
        "arena_extend_strategy": int(size <= 0),  # 0: doubles, 1: as requested
        "initial_chunk_size_bytes": max(1, size),
        "max_power_of_two_extend_bytes": 1 << 20,
    }
    kind = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    try:
        ort.create_and_register_allocator(kind, ort.OrtArenaCfg(settings))
    except Exception:  # onnxruntime raises its own unrelated exception types
        return False
    return True


def _shrinking() -> Any:
    """Return run options that release the arena's memory after the run, for graphs that share the arena."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _by_port(args: Sequence[Any]) -> list[list[Any]]:
    """Group a session's outputs ``args`` by port: successive rows of one state tensor form one group."""

    def whole(numbered: tuple[int, Any]) -> str | int:
        rows = parse_rows(numbered[1].name)
        return rows.whole if rows else numbered[0]

    return [[arg for _, arg in group] for _, group in itertools.groupby(enumerate(args), key=whole)]


def _place(
    value: Any, port: Port, rows: RowRange, shape: Sequence[int]
) -> tuple[str, int, Any, list[int], int]:
    """Return the arguments that bind rows of a state tensor: (device, device number, dtype, shape in the graph,
    address).

    onnxruntime sees only the address, so the tensor is checked here. BundleError if it differs from the manifest.
    """
    found, dtype = tuple(value.shape()), np.dtype(port.dtype)
    if found != tuple(port.shape) or _dtype_name(value.data_type()) != port.dtype:
        raise BundleError(
            f"state {port.name!r} should be {port.dtype} {tuple(port.shape)}, found {value.data_type()} {found}; begin the "
            "round again",
            port=port.name,
        )
    _, address = rows.place(value.data_ptr(), found, dtype.itemsize)
    return _DEVICE, 0, dtype.type, list(shape), address


def _dtype_name(element_type: str) -> str:
    """Return numpy's name of onnxruntime's ``element_type``, such as ``tensor(float)``."""
    name = element_type.removeprefix("tensor(").removesuffix(")")
    return _DTYPES.get(name, name)


def _outputs_differ(port: Port, args: Sequence[Any]) -> list[str]:
    """Return a text for each contradiction between a port and its outputs, such as rows that do not cover it."""
    parts = [rows for arg in args if (rows := parse_rows(arg.name))]
    if parts and (port.role != "state" or not cover(parts, port.shape[0] if port.shape else 0)):
        return [f"{port.name}: rows that are not all of it"]
    return [_differs(port, arg) for arg in args]


def _differs(port: Port, arg: Any) -> str:
    """Return the contradiction between an input or output of the session and its port, or "" if there is none.

    Unknown sizes contradict nothing, except for rows: they are bound by address, so their shape and place must be
    known. A graph may give rows another shape with as many entries.
    """
    dtype, shape, wanted = _dtype_name(arg.type), tuple(arg.shape), tuple(port.shape)
    rows = parse_rows(arg.name)
    if rows is not None:
        if port.role != "state" or not wanted or not rows.start < rows.stop <= wanted[0]:
            return f"{arg.name}: no rows of the state that the manifest lists"
        wanted = (rows.stop - rows.start, *wanted[1:])
        alike = all(isinstance(size, int) for size in shape) and math.prod(shape) == math.prod(wanted)
    else:
        sizes = zip(shape, wanted, strict=False)
        alike = len(shape) == len(wanted) and all(
            size == length or not isinstance(size, int) for size, length in sizes
        )
    if dtype == port.dtype and alike:
        return ""
    return f"{arg.name}: {port.dtype} {wanted} listed, {dtype} {shape} in the graph"
