"""ExecuTorch programs through the C ABI of ``native.cpp``, and the memory addresses of their inputs and outputs.

The values of a program correspond to ports by order if none has a name. If some values are rows of a state port, all
have names (:mod:`edgefl.wire.bundle.graphs`). Running a program releases Python's global lock.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from edgefl.errors import BundleError, ConfigError
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl.wire.bundle.graphs import RowRange, cover, parse_rows
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.tensors import Array
from edgefl_device.engine.executorch.build import LIBRARIES, ExecuTorchWheel, binding, build

_ALIGNMENT = 16
"""What ExecuTorch wants of a program in memory."""


_MOST_INSTRUCTIONS = 1 << 14
"""Of a program that is timed; those after them are left out."""


class NativeError(Exception):
    """Failure of the ExecuTorch runtime to load or run a program."""


@dataclass(frozen=True)
class ProgramValue:
    """Input or output of a program.

    Attributes:
        name: Name; "" unless some values of the program are rows of a port.
        dtype: Numpy name of its type.
        shape: Its shape.
        planned: True if the program provides its memory, so that the caller cannot.
        permuted: True if its dimensions are not in the usual order in memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    planned: bool
    permuted: bool


class NativeLibraries:
    """The loaded native libraries, once per process: kernels and delegates register themselves when loaded."""

    def __init__(self, wheel: ExecuTorchWheel) -> None:
        try:
            # By path, so that the binding finds them already there, wherever it was compiled.
            self._kept = [ctypes.CDLL(str(wheel.library(name))) for name in LIBRARIES]
        except OSError as error:
            raise ConfigError(
                f"executorch {wheel.version} at {wheel.root} cannot be loaded: {error}; install it again for this machine, "
                "or use `engine` onnx"
            ) from error
        self.calls = load(wheel, _print)
        self.opened = 0
        self._threads = 0
        _declare(self.calls)

    def error(self) -> NativeError:
        """Return the last failure on this thread as an exception to raise."""
        text: bytes = self.calls.edgefl_error()
        return NativeError(text.decode(errors="replace"))

    def set_threads(self, count: int) -> None:
        """Set the number of threads of the pool that kernels and delegates share.

        Raises:
            NativeError: Programs that use another number are still open, or the number is not possible.
        """
        if count == self._threads:
            return
        if self.opened:
            gc.collect()  # an error that was handled may still hold one
        if self.opened:
            raise NativeError(f"{self.opened} programs are open that work with {self._threads}")
        if self.calls.edgefl_threads(count) != 0:
            raise self.error()
        self._threads = count


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load(wheel: ExecuTorchWheel, say: Callable[[str], None]) -> ctypes.CDLL:
    """Load the binding to ``wheel``, the installed ExecuTorch; compile it again if the cached file does not load.

    ``say`` receives messages for people.

    Raises:
        ConfigError: The binding cannot be compiled or loaded.
    """
    path = binding(wheel, say)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        say(f"the ExecuTorch binding cannot be loaded ({error}), building it again")
    path = build(wheel, path.parent)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"the ExecuTorch binding {path} cannot be loaded: {error}; delete the file and install executorch again, "
            "or use `engine` onnx"
        ) from error


class NativeProgram:
    """Program in memory. Its ports can be read at once; call :meth:`prepare` before it runs."""

    def __init__(self, native: NativeLibraries, data: bytes) -> None:
        self._native = native
        self._data = _align(data)
        self._handle = native.calls.edgefl_open(self._data.ctypes.data, self._data.size)
        if not self._handle:
            raise native.error()
        native.opened += 1

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._native.calls.edgefl_close(self._handle)
            self._native.opened -= 1

    @property
    def planned_bytes(self) -> int:
        """Bytes of the arena that was planned at export."""
        return int(self._native.calls.edgefl_planned_bytes(self._handle))

    def inputs(self) -> list[ProgramValue]:
        return [self._value(0, at) for at in range(self._native.calls.edgefl_count(self._handle, 0))]

    def outputs(self) -> list[ProgramValue]:
        return [self._value(1, at) for at in range(self._native.calls.edgefl_count(self._handle, 1))]

    def prepare(self) -> None:
        """Allocate the arena, look up kernels and set up delegates, so that the program can run.

        Raises:
            NativeError: The arena does not fit, a kernel is missing, or a delegate fails.
        """
        if self._native.calls.edgefl_prepare(self._handle) != 0:
            raise self._native.error()

    def run(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run once.

        Args:
            inputs: Memory address of each input; the memory must be as large as the program lists.
            outputs: Memory address of each output, likewise.

        Raises:
            NativeError: The runtime reports a failure.
        """
        sources, targets = (c_void_p * len(inputs))(*inputs), (c_void_p * len(outputs))(*outputs)
        if self._native.calls.edgefl_run(self._handle, sources, targets) != 0:
            raise self._native.error()

    def run_timed(self, inputs: Sequence[int], outputs: Sequence[int]) -> list[float]:
        """Run once like :meth:`run`, and return the milliseconds of each instruction. Slightly slower than :meth:`run`."""
        sources, targets = (c_void_p * len(inputs))(*inputs), (c_void_p * len(outputs))(*outputs)
        took = (c_int64 * _MOST_INSTRUCTIONS)()
        count = self._native.calls.edgefl_run_timed(self._handle, sources, targets, took, len(took))
        if count < 0:
            raise self._native.error()
        return [nanoseconds / 1e6 for nanoseconds in took[:count]]

    def _value(self, is_output: int, at: int) -> ProgramValue:
        rank, sizes, planned, permuted = c_int64(), POINTER(c_int32)(), c_int(), c_int()
        code = self._native.calls.edgefl_value(
            self._handle, is_output, at, byref(rank), byref(sizes), byref(planned), byref(permuted)
        )
        name: bytes = self._native.calls.edgefl_name(self._handle, is_output, at)
        return ProgramValue(
            name.decode(errors="replace"),
            EXECUTORCH_DTYPES.get(code, f"type {code}"),
            tuple(sizes[dim] for dim in range(rank.value)),
            bool(planned.value),
            bool(permuted.value),
        )


def _align(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return ``data`` as an array that starts at a multiple of 16 bytes; copied only if it does not."""
    source = np.frombuffer(data, np.uint8)
    if source.ctypes.data % _ALIGNMENT == 0:
        return source
    room = np.empty(source.size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    room[start : start + source.size] = source
    return room[start : start + source.size]


def _declare(calls: ctypes.CDLL) -> None:
    pointers = POINTER(c_void_p)
    value = (
        c_void_p,
        c_int,
        c_int64,
        POINTER(c_int64),
        POINTER(POINTER(c_int32)),
        POINTER(c_int),
        POINTER(c_int),
    )
    for name, result, arguments in (
        ("edgefl_error", c_char_p, ()),
        ("edgefl_threads", c_int, (c_uint32,)),
        ("edgefl_open", c_void_p, (c_void_p, c_size_t)),
        ("edgefl_prepare", c_int, (c_void_p,)),
        ("edgefl_count", c_int64, (c_void_p, c_int)),
        ("edgefl_value", c_int, value),
        ("edgefl_name", c_char_p, (c_void_p, c_int, c_int64)),
        ("edgefl_planned_bytes", c_int64, (c_void_p,)),
        ("edgefl_run", c_int, (c_void_p, pointers, pointers)),
        ("edgefl_run_timed", c_int64, (c_void_p, pointers, pointers, POINTER(c_int64), c_int64)),
        ("edgefl_close", None, (c_void_p,)),
    ):
        function = getattr(calls, name)
        function.restype, function.argtypes = result, list(arguments)


# Memory for values that a program reads and writes in place: no copies between calls.

_VALUE_ALIGNMENT: Final = 64
_SLACK: Final = 64
"""XNNPACK's kernels may read this far (16 bytes on most processors) beyond the end of an input."""


def new_buffer(port: Port) -> Array:
    """Return an uninitialized array for ``port``, with spare bytes behind it, because kernels may read beyond its end."""
    return _room(port.shape, np.dtype(port.dtype))


def owned_copy(array: Array) -> Array:
    """Return a copy of ``array`` with spare bytes behind it, because kernels may read beyond its end."""
    copy = _room(array.shape, array.dtype)
    copy[...] = array
    return copy


def checked(array: Array, port: Port, graph: str) -> Array:
    """Check the shape and dtype of ``array`` against ``port``, and return it unchanged. ``graph`` is the graph's name,
    for the error.

    Raises:
        BundleError: Shape or dtype differ; the program would read beyond its memory.
    """
    if array.shape != port.shape or array.dtype != np.dtype(port.dtype):
        raise BundleError(
            f"graph {graph!r} takes {port.dtype} {port.shape} at {port.name!r}, and was given {array.dtype} {array.shape}: "
            "the values do not belong to this bundle",
            graph=graph,
            port=port.name,
        )
    return array


def readable(array: Array) -> Array:
    """Return ``array`` in C order, aligned and safely readable beyond its end; copied only if needed."""
    plain = np.require(array, requirements=("C", "A"))
    end = plain.ctypes.data + plain.nbytes
    # A process has whole pages: reads beyond the end are safe unless they reach the next page.
    return owned_copy(plain) if -end % mmap.PAGESIZE < _SLACK else plain


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _VALUE_ALIGNMENT + _SLACK, np.uint8)
    start = -room.ctypes.data % _VALUE_ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


_MOST_TEXT = 200


@dataclass(frozen=True)
class ValueLocation:
    """Location of a program's value: the array of ``port`` as a whole (``rows`` None), or some of its rows."""

    port: Port
    rows: RowRange | None

    def address(self, arrays: Mapping[str, Array]) -> int:
        """Return the memory address of the value.

        Args:
            arrays: Arrays by port name, with the types and shapes of the ports.
        """
        array = arrays[self.port.name]
        start = int(array.ctypes.data)
        return self.rows.place(start, array.shape, array.itemsize)[1] if self.rows else start

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return tuple(self.port.shape)
        return self.rows.stop - self.rows.start, *self.port.shape[1:]


def places(
    graph: Graph, inputs: Sequence[ProgramValue], outputs: Sequence[ProgramValue]
) -> tuple[tuple[ValueLocation, ...], tuple[ValueLocation, ...]]:
    """Return (locations of the program's inputs, locations of its outputs), each in the program's order.

    Raises:
        BundleError: Inputs or outputs contradict the manifest, or an output's memory cannot be provided.
    """
    wrong: list[str] = []
    found = (
        _locate("inputs", graph.inputs, inputs, wrong),
        _locate("outputs", graph.outputs, outputs, wrong),
    )
    if not wrong:
        wrong += [*_unlike(found[0], inputs, False), *_unlike(found[1], outputs, graph.planned_outputs)]
        wrong += _find_uncovered(graph.outputs, found[1])
    if wrong:
        listed = "; ".join(text[:_MOST_TEXT] for text in wrong[:5])
        raise BundleError(
            f"graph {graph.name!r} and its manifest disagree on {listed}: export the bundle again",
            graph=graph.name,
        )
    return found


def _locate(
    kind: str, ports: tuple[Port, ...], values: Sequence[ProgramValue], wrong: list[str]
) -> tuple[ValueLocation, ...]:
    """Return for each value of a program its port, and the rows of the port that it holds, if it holds only some.

    Values match ports by name, or by order if no value has a name.

    Args:
        kind: ``inputs`` or ``outputs``, for the texts.
        ports: The manifest's inputs or outputs.
        values: The program's inputs or outputs.
        wrong: List that receives a text for each value without a port, and for each port without a value.
    """
    if not any(value.name for value in values):
        if len(ports) != len(values):
            wrong.append(f"{len(ports)} {kind} listed, {len(values)} in the program")
            return ()
        return tuple(ValueLocation(port, None) for port in ports)
    listed = {port.name: port for port in ports}
    found: list[ValueLocation] = []
    for value in values:
        rows = parse_rows(value.name)
        port = listed.get(rows.whole if rows else value.name)
        held = port.shape[0] if port and port.role == "state" and port.shape else 0
        if port is None or (rows and not rows.start < rows.stop <= held):
            wrong.append(f"{value.name}: the manifest lists no such {kind}")
        else:
            found.append(ValueLocation(port, rows))
    missing = listed.keys() - {place.port.name for place in found}
    wrong += [f"{name}: it is missing from the {kind} of the program" for name in sorted(missing)]
    return tuple(found)


def _unlike(found: Sequence[ValueLocation], values: Sequence[ProgramValue], planned: bool) -> Iterator[str]:
    for place, value in zip(found, values, strict=True):
        name = value.name or place.port.name
        if (place.port.dtype, place.shape) != (value.dtype, value.shape):
            yield f"{name}: {place.port.dtype} {place.shape} listed, {value.dtype} {value.shape} in the program"
        if value.planned != planned:
            where = "memory that the program planned itself", "the caller's memory"
            yield f"{name}: it is in {where[planned]}"
        if value.permuted:
            yield f"{name}: it is not in row order"


def _find_uncovered(ports: Sequence[Port], found: Sequence[ValueLocation]) -> Iterator[str]:
    """Yield a text for each port that the values at the locations ``found`` do not write exactly once: as one value, or
    by rows that cover it.
    """
    for port in ports:
        parts = [place.rows for place in found if place.port is port]
        rows = [each for each in parts if each]
        is_whole = parts == [None]
        if not is_whole and (len(rows) < len(parts) or not cover(rows, port.shape[0])):
            yield f"{port.name}: rows that are not all of it"
