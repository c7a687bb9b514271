"""The C ABI of ``native.cpp`` by ctypes. A call lets other threads of Python run meanwhile."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass

import numpy as np

from edgefl.errors import ConfigError
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl_device.engine.executorch.build import LIBRARIES, Wheel, binding, build

_ALIGNMENT = 16
"""What ExecuTorch wants of a program in memory."""


_MOST_INSTRUCTIONS = 1 << 14
"""Of a program that is timed; those after them are left out."""


class NativeError(Exception):
    """Error of the runtime for a program that it cannot load or run."""


@dataclass(frozen=True)
class ProgramValue:
    """Input or output of a program.

    ``planned``: the program keeps its memory, so that the caller cannot provide any. ``name``: "" unless some values of the
    program are rows of a port.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    planned: bool
    permuted: bool


class Native:
    """The loaded libraries. One set for the process: kernels and delegates register themselves when loaded."""

    def __init__(self, wheel: Wheel, say: Callable[[str], None]) -> None:
        try:
            # By path, so that the binding finds them already there, wherever it was compiled.
            self._kept = [ctypes.CDLL(str(wheel.library(name))) for name in LIBRARIES]
        except OSError as error:
            raise ConfigError(
                f"executorch {wheel.version} at {wheel.root} cannot be loaded: {error}; install it again for this machine, "
                "or use `engine` onnx"
            ) from error
        self.calls = load(wheel, say)
        self.opened = 0
        self._threads = 0
        _declare(self.calls)

    def error(self) -> NativeError:
        """Return the last failure on this thread."""
        text: bytes = self.calls.edgefl_error()
        return NativeError(text.decode(errors="replace"))

    def set_threads(self, count: int) -> None:
        """Set the threads of the pool that kernels and delegates share; NativeError while programs are some that were
        opened with another number."""
        if count == self._threads:
            return
        if self.opened:
            gc.collect()  # an error that was handled may still hold one
        if self.opened:
            raise NativeError(f"{self.opened} programs are open that work with {self._threads}")
        if self.calls.edgefl_threads(count) != 0:
            raise self.error()
        self._threads = count


def load(wheel: Wheel, say: Callable[[str], None]) -> ctypes.CDLL:
    """Return the binding, compiled again if the cached one does not load; ConfigError if that fails."""
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
    """Program in memory: its ports can be read first, then :meth:`prepare` makes it ready to run."""

    def __init__(self, native: Native, data: bytes) -> None:
        self._native = native
        self._data = _aligned(data)
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
        """The arena that was planned at export."""
        return int(self._native.calls.edgefl_planned_bytes(self._handle))

    def inputs(self) -> list[ProgramValue]:
        return [self._value(0, at) for at in range(self._native.calls.edgefl_count(self._handle, 0))]

    def outputs(self) -> list[ProgramValue]:
        return [self._value(1, at) for at in range(self._native.calls.edgefl_count(self._handle, 1))]

    def prepare(self) -> None:
        """Allocate the arena, look up kernels, set up delegates."""
        if self._native.calls.edgefl_prepare(self._handle) != 0:
            raise self._native.error()

    def run(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run once, with an address for every input and output, whose memory is as large as the program lists."""
        sources, targets = (c_void_p * len(inputs))(*inputs), (c_void_p * len(outputs))(*outputs)
        if self._native.calls.edgefl_run(self._handle, sources, targets) != 0:
            raise self._native.error()

    def run_timed(self, inputs: Sequence[int], outputs: Sequence[int]) -> list[float]:
        """Run once as :meth:`run` does, a little slower; return the milliseconds of each instruction."""
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


def _aligned(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return ``data`` if it starts at a multiple of 16, as bytes of Python usually do, else a copy that does."""
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
