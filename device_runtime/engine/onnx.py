"""Stock ONNX Runtime. State is bound in place of being copied through Python between steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from device_runtime.engine.base import Outputs, State
from device_runtime.engine.segments import SegmentedGraph, load_segments
from device_runtime.memory import release_code
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.errors import BundleError
from edgefl.wire.tensors import Array, Arrays

_DEVICE = "cpu"
_LIBRARY = "onnxruntime_pybind11_state"
_ELSEWHERE = b"\x0a\x08location"
"""In a model's bytes: the key under which a tensor names a file that holds its numbers."""
_DTYPES = {"float": "float32", "double": "float64"}


class OnnxEngine:
    """Runs ``onnx`` graphs on the CPU with ``threads`` threads per operator. ``pages``: the folder for what graphs in
    segments keep on the disk."""

    name = "onnxruntime"
    format = "onnx"

    def __init__(self, threads: int = 1, pages: Path | None = None) -> None:
        self.version = str(ort.__version__)
        self._threads = threads
        self._pages = pages

    def load(self, graph: Graph, artifact: bytes) -> OnnxGraph | SegmentedGraph:
        if not graph.segments:
            return self._loaded(graph, artifact, self._options())
        _share_arena()
        options = self._options()
        options.add_session_config_entry("session.use_env_allocators", "1")
        load = functools.partial(self._loaded, options=options, shrinks=True)
        return load_segments(graph, artifact, self._pages, load)

    def _loaded(self, graph: Graph, artifact: bytes, options: Any, shrinks: bool = False) -> OnnxGraph:
        if _ELSEWHERE in artifact:  # versions of onnxruntime open it
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
            ) from error
        release_code(_LIBRARY)  # of parsing and rewriting graphs: 9 MB that no step needs
        return OnnxGraph(graph, session, shrinks=shrinks)

    def _options(self) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
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
        """Copies: a graph may write over its state, and the arrays are somebody else's."""
        state: State = {}
        for name, array in arrays.items():
            state[name] = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, _DEVICE)
            state[name].update_inplace(np.ascontiguousarray(array))
        return state


class OnnxGraph:
    """One session and its manifest entry. Outputs are matched by position: ONNX allows no name on both sides.

    State that the graph rewrites is written into the memory that it is read from where the manifest allows it
    (``Graph.in_place``). The rest moves between two sets of buffers, one read and one written in turn: outputs taken anew
    from the arena each step would leave gaps between its blocks that nothing fits.
    """

    def __init__(self, graph: Graph, session: Any, *, shrinks: bool = False) -> None:
        self._graph = graph
        self._run_options = _shrinking() if shrinks else None
        self._session = session
        inputs, outputs = {arg.name: arg for arg in session.get_inputs()}, session.get_outputs()
        self._outputs = [arg.name for arg in outputs]
        self._last: State = {}
        self._spare: State = {}
        wrong = sorted(inputs.keys() ^ {port.name for port in graph.inputs})
        wrong += [_differs(port, inputs[port.name]) for port in graph.inputs if port.name in inputs]
        wrong += [_differs(port, arg) for port, arg in zip(graph.outputs, outputs, strict=False)]
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
        """See :class:`device_runtime.engine.segments.LoadedSegment`."""
        in_place = {name: state[name] for name in self._graph.in_place}
        later_state = {
            port.name: in_place.get(port.name) or self._buffer(port)
            for port in self._graph.outputs_of("state")
        }
        binding = self._session.io_binding()
        for port in self._graph.inputs:
            if port.role == "state":
                binding.bind_ortvalue_input(port.name, state[port.name])
            else:
                binding.bind_cpu_input(port.name, np.asarray(feeds[port.name], order="C"))
        for port, name in zip(self._graph.outputs, self._outputs, strict=True):
            if port.role == "state":
                binding.bind_ortvalue_output(name, later_state[port.name])
            elif port.name in rooms:
                room = rooms[port.name]
                binding.bind_output(name, _DEVICE, 0, room.dtype.type, room.shape, room.ctypes.data)
            else:
                binding.bind_output(name, _DEVICE)
        self._session.run_with_iobinding(binding, self._run_options)
        values = dict(zip((port.name for port in self._graph.outputs), binding.get_outputs(), strict=True))
        arrays = {
            name: value.numpy()
            for name, value in values.items()
            if not {name} & (later_state.keys() | rooms.keys())
        }
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


@functools.cache
def _share_arena() -> None:
    """One arena for all segments of a process: with one for each, what a segment has given back would be of no use to the
    next. It is onnxruntime's own with its own settings, of which there can be one."""
    kind = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(kind, ort.OrtArenaCfg(0, -1, -1, -1))


def _shrinking() -> Any:
    """Options of a run that ends with giving the arena's memory back to the system: the next segment has pages of its own to
    hold, and the arena outlives the graphs that share it."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _differs(port: Port, arg: Any) -> str:
    """What onnxruntime says of a port where it contradicts the manifest, else "". Unknown sizes contradict nothing."""
    element_type = arg.type.removeprefix("tensor(").removesuffix(")")
    dtype, shape = _DTYPES.get(element_type, element_type), tuple(arg.shape)
    same_rank = len(shape) == len(port.shape)
    if (
        dtype == port.dtype
        and same_rank
        and all(
            size == wanted or not isinstance(size, int)
            for size, wanted in zip(shape, port.shape, strict=True)
        )
    ):
        return ""
    return f"{port.name}: {port.dtype} {port.shape} listed, {dtype} {shape} in the graph"
