"""Engine whose graphs run in another process: its start, its requests, and its end.

The process starts when it is needed and ends when the device is idle.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from edgefl import wire
from edgefl.errors import BundleError, ConfigError, EdgeflError, RoundDeclined, StoreError, not_on_windows
from edgefl.system.memory import status_bytes
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import CRASHED, MALFORMED
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import printable
from edgefl_device.engine import ENGINES, MOST_THREADS
from edgefl_device.engine.base import Engine, Outputs, State
from edgefl_device.sandbox.confine import Confinement
from edgefl_device.sandbox.frames import EnginePipe, PipeClosed, TookTooLong, widen
from edgefl_device.sandbox.messages import (
    EngineAnswer,
    EngineOpened,
    EngineRequest,
    FreeState,
    GraphLoaded,
    GraphRan,
    LoadGraph,
    OpenEngine,
    ReadState,
    RequestFailed,
    RunGraph,
    StateCreated,
    StateTensors,
    TensorHeader,
)

_KEPT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "HOME", "LANG", "LC_ALL", "SYSTEMROOT")
_MOST_WORDS = 300
_MOST_BYTES = 8192
_END_S = 1.0


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of ``python -m module arguments`` with the packages of this process.

    ``-P`` excludes the working folder from imports, because a graph may have written there.
    """
    ways = [str(Path(os.path.abspath(str(file))).parents[2]) for file in (__file__, wire.__file__)]
    begin = (
        f"import runpy, sys; sys.path[:0] = [each for each in {list(dict.fromkeys(ways))!r} if each not in sys.path]; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", begin, *arguments]


def environment() -> dict[str, str]:
    """Return the environment for an engine's process: variables of Python and libraries, with absolute paths.

    The agent's other variables are left out, because they may contain a password.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    ways = os.environ.get("PYTHONPATH", "")
    if ways:
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, ways.split(os.pathsep)))
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


class StderrTail:
    """Last lines of a process's standard error, read by a thread so that the process never blocks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._end = b""
        self._thread = threading.Thread(target=self._read, name="complaints", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # closed
            while piece := os.read(self._stream.fileno(), 4096):
                self._end = (self._end + piece)[-_MOST_BYTES:]

    def last(self) -> str:
        """Return the last error output of a finished process in one line; "" if there is none."""
        words = " ".join(self.lines())
        return printable(words[-_MOST_WORDS:])

    def lines(self) -> list[str]:
        """Return the last error lines of a finished process."""
        self._thread.join(_END_S)
        return [line.strip() for line in self._end.decode(errors="replace").strip().splitlines()]

    def close(self) -> None:
        self._thread.join(_END_S)
        if not self._thread.is_alive():  # else a process below it has the other end
            self._stream.close()


if TYPE_CHECKING:
    import subprocess

START_S = 120.0
_ERRORS: dict[int, type[EdgeflError]] = {
    each.exit_code: each for each in (ConfigError, BundleError, StoreError)
}
_ADDRESS_BYTES = 4 << 30
"""Address space beside what the device offers: code, threads' stacks, and what an allocator sets apart and never uses."""
_decoder = msgspec.msgpack.Decoder(EngineAnswer)


class EngineFailed(RuntimeError):
    """Error of an engine itself, with the text that its process reported. Expected errors keep their own types."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Settings of an engine's process.

    Attributes:
        engine: Name of the engine.
        threads: Number of threads that runs a graph.
        most_threads: Largest number of threads that a graph can be loaded with, as in
            :func:`edgefl_device.engine.open_engine`.
        pages: Folder for values that graphs keep on disk; None for none.
        step_s: Longest call in seconds.
        memory_bytes: Memory that the device offers to training; 0: without limit.
        file_bytes: Largest file; 0: without limit.
        cpu_s: Processor time of the process in seconds; 0: without limit.
        readable: Further files that it may read.
    """

    engine: str
    threads: int = 1
    most_threads: int = 0
    pages: Path | None = None
    step_s: float = 600.0
    memory_bytes: int = 0
    file_bytes: int = 0
    cpu_s: int = 0
    readable: tuple[str, ...] = ()

    def first_word(self) -> OpenEngine:
        return OpenEngine(
            engine=self.engine,
            threads=self.threads,
            most_threads=self.most_threads,
            pages=self._pages,
            confinement=self.confinement(),
        )

    def confinement(self) -> Confinement:
        """Return the rights of the process."""
        return Confinement(
            memory_bytes=_ADDRESS_BYTES + 2 * self.memory_bytes if self.memory_bytes else 0,
            file_bytes=self.file_bytes,
            cpu_s=self.cpu_s,
            writable=self._pages,
            readable=self.readable,
        )

    @property
    def _pages(self) -> str:
        return str(self.pages.resolve()) if self.pages else ""


class EngineProcess:
    """Running process of an engine, with the pipe to it. One thread at a time, the agent's worker, may call its methods."""

    def __init__(self, settings: SandboxSettings) -> None:
        import subprocess  # most devices wait without a process: they are to be small
        import tempfile

        self._step_s = settings.step_s
        self._place = None if settings.pages else tempfile.TemporaryDirectory(prefix="edgefl-engine-")
        if settings.pages:
            _make_empty(settings.pages)
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command("edgefl_device.sandbox.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._place.name if self._place else settings.pages,
            env=environment(),
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._complaints = StderrTail(self.process.stderr)
        read_end, write_end = self.process.stdout.fileno(), self.process.stdin.fileno()
        widen(write_end)
        if sys.platform != "win32":
            os.set_blocking(write_end, False)
        self._line = EnginePipe(read_end, write_end, time.monotonic() + START_S)
        self._gone: list[int] = []
        self._gone_graphs: list[int] = []
        self._graphs = 0
        self.ended = ""
        opened = self.ask(settings.first_word(), within_s=START_S)
        assert isinstance(opened, EngineOpened)
        self.opened = opened
        self._idle_bytes = status_bytes("RssAnon", self.process.pid)

    def ask(
        self, word: EngineRequest, arrays: list[Array] | None = None, *, within_s: float = 0.0
    ) -> EngineAnswer:
        """Send a request and return the process's answer.

        Args:
            word: The request.
            arrays: Arrays that follow it.
            within_s: Longest time in seconds; 0: the longest time of a step.

        Raises:
            RoundDeclined: The process has ended, or took too long and was ended.
            EngineFailed: The engine reports an error of its own.
            EdgeflError: The engine reports an expected error, raised with its type.
        """
        if self.ended:
            raise RoundDeclined(CRASHED, self.ended)
        self._line.until = time.monotonic() + (within_s or self._step_s)
        try:
            if self._gone or self._gone_graphs:
                state, graphs = self._gone[:], self._gone_graphs[:]
                del self._gone[: len(state)], self._gone_graphs[: len(graphs)]
                self._line.send(msgspec.msgpack.encode(FreeState(state=tuple(state), graphs=tuple(graphs))))
            self._line.send(msgspec.msgpack.encode(word), arrays or [])
            answer: EngineAnswer = _decoder.decode(self._line.head())
        except (PipeClosed, TookTooLong, *MALFORMED) as error:
            raise self.stop_after(error) from error
        if isinstance(answer, RequestFailed):
            kind = _ERRORS.get(answer.code)
            raise kind(answer.text) if kind else EngineFailed(answer.text)
        return answer

    def array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Read and return the next array that follows an answer.

        Raises:
            RoundDeclined: The process has ended, or took too long and was ended.
        """
        try:
            return self._line.array(dtype, shape)
        except (PipeClosed, TookTooLong, ValueError, TypeError, MemoryError) as error:
            raise self.stop_after(error) from error

    def stop_after(self, error: Exception) -> RoundDeclined:
        """Stop the process and return the RoundDeclined to raise; its text names timeout, lack of memory, or the exit."""
        with contextlib.suppress(Exception):
            self.process.wait(0.5 if isinstance(error, PipeClosed) else 0.0)
        code = self.process.poll()
        words = self._complaints.last() if code is not None else ""
        self.end()
        if isinstance(error, TookTooLong):
            why = f"it took longer than {self._step_s:g} s (limits.max_step_s) for one step"
        elif isinstance(error, MemoryError):
            why = "there is no memory here for what it answered"
        elif code is None:
            why = "what it answered cannot be read"
        else:
            why = _signal(-code) if code < 0 else f"it exited with code {code}"
            why += f": {words}" if words else ""
        self.ended = f"the engine's process ended: {why}"
        return RoundDeclined(CRASHED, self.ended)

    def number_graph(self) -> int:
        self._graphs += 1
        return self._graphs

    def hold(self, number: int, dtype: str, shape: tuple[int, ...]) -> RemoteTensor:
        """Return a handle of state tensor ``number``. When the handle is garbage, the process frees the tensor."""
        remote = RemoteTensor(self, number, np.dtype(dtype).str, tuple(shape))
        weakref.finalize(remote, self._gone.append, number)
        return remote

    def forget_graph(self, number: int) -> None:
        self._gone_graphs.append(number)

    def used_bytes(self) -> int:
        """Return the anonymous memory of the process, minus that which it had when idle; 0 if the system does not
        report it.
        """
        return max(0, status_bytes("RssAnon", self.process.pid) - self._idle_bytes)

    def end(self) -> None:
        self.ended = self.ended or "the engine's process was ended"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform != "win32":  # with what it may have started, also where it ended before
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._complaints.close()
        if self._place is not None:
            self._place.cleanup()


@dataclass(eq=False)
class RemoteTensor:
    """Handle of a state tensor in the engine's process, with the expected dtype (``numpy.dtype.str``) and shape."""

    process: EngineProcess
    number: int
    dtype: str
    shape: tuple[int, ...]

    def description(self, name: str) -> TensorHeader:
        """Return the header with name, dtype and shape that the process must send for this tensor."""
        return TensorHeader(name=name, dtype=self.dtype, shape=self.shape)


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    told = {
        "SIGKILL": "killed, as by a system that is out of memory",
        "SIGXCPU": "its processor time was over",
        "SIGSEGV": "it read or wrote where nothing is",
    }
    return f"{name}: {told[name]}" if name in told else name


def _make_empty(path: Path) -> None:
    """Create the folder ``path`` if needed, and delete files of an earlier process in it."""
    import shutil

    try:
        path.mkdir(parents=True, exist_ok=True)
        for left in path.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
    except OSError as error:
        raise StoreError(
            f"the folder {path} cannot be made, or not be emptied: {error.strerror}; choose another `--store`"
        ) from error


class SandboxedEngine:
    """Engine whose graphs run in a separate process with few rights. Results have the same bits as in this process."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._process: EngineProcess | None = None
        opened = self._running().opened
        self.name, self.version, self.format = opened.name, opened.version, opened.format
        self.thread_counts = opened.thread_counts
        self.missing = opened.missing
        """What the system does not confine, and why."""

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> SandboxedGraph:
        process = self._running()
        number = process.number_graph()
        word = LoadGraph(number=number, graph=graph, nbytes=len(artifact), threads=threads)
        answer = process.ask(
            word, [np.frombuffer(artifact, np.uint8)], within_s=max(START_S, self._settings.step_s)
        )
        if not isinstance(answer, GraphLoaded):
            raise process.stop_after(ValueError("another answer"))
        return SandboxedGraph(process, graph, number)

    def read_state(self, state: State) -> Arrays:
        if not state:
            return {}
        process = next(iter(state.values())).process
        answer = process.ask(ReadState(state=_state_numbers(process, state)))
        expected = tuple(value.description(name) for name, value in state.items())
        if not isinstance(answer, StateTensors) or answer.tensors != expected:
            raise process.stop_after(ValueError("another answer"))
        return {each.name: process.array(each.dtype, each.shape) for each in expected}

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        process = self._running()
        made = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        word = StateTensors(
            tensors=tuple(
                TensorHeader(name=name, dtype=a.dtype.str, shape=a.shape) for name, a in made.items()
            )
        )
        answer = process.ask(word, list(made.values()))
        if not isinstance(answer, StateCreated) or answer.state.keys() != made.keys():
            raise process.stop_after(ValueError("another answer"))
        return {
            name: process.hold(number, made[name].dtype.str, made[name].shape)
            for name, number in answer.state.items()
        }

    @property
    def confinement(self) -> Confinement:
        """Rights of the engine's process."""
        return self._settings.confinement()

    def used_bytes(self) -> int:
        """Return the anonymous memory of the process above its idle memory; 0 if no process runs."""
        return self._process.used_bytes() if self._process is not None else 0

    def rest(self) -> None:
        """End the process, if one runs. The next call starts another."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _running(self) -> EngineProcess:
        if sys.platform == "win32":
            raise not_on_windows("an engine in a process of its own")
        if self._process is None or self._process.ended:
            self._process = EngineProcess(self._settings)
        return self._process


class SandboxedGraph:
    """Graph that is loaded in the engine's process; it runs there."""

    def __init__(self, process: EngineProcess, graph: Graph, number: int) -> None:
        self._process = process
        self._graph = graph
        self._number = number
        self._reads = {port.name for port in graph.inputs if port.role == "state"}
        self._fed = [port for port in graph.inputs if port.role != "state"]
        self._gives = [port for port in graph.outputs if port.role != "state"]
        self._keeps = {port.name: port for port in graph.outputs if port.role == "state"}
        weakref.finalize(self, process.forget_graph, number)

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        process = self._process
        read = {name: value for name, value in state.items() if name in self._reads}
        arrays = [_fitting(port, feeds[port.name]) for port in self._fed]
        answer = process.ask(RunGraph(number=self._number, state=_state_numbers(process, read)), arrays)
        if not isinstance(answer, GraphRan) or answer.state.keys() != self._keeps.keys():
            raise process.stop_after(ValueError("another answer"))
        outputs = {port.name: process.array(port.dtype, port.shape) for port in self._gives}
        state = {
            name: process.hold(answer.state[name], port.dtype, port.shape)
            for name, port in self._keeps.items()
        }
        return Outputs(state, outputs)


def rest(engine: Engine) -> None:
    """End the process of ``engine``, if it is a SandboxedEngine."""
    if isinstance(engine, SandboxedEngine):
        engine.rest()


def missing(engine: Engine) -> tuple[str, ...]:
    """Return the protections that the system does not support for the engine's process, each with the reason."""
    return engine.missing if isinstance(engine, SandboxedEngine) else ()


def confinement(engine: Engine) -> Confinement | None:
    """Return the rights of processes that run graphs for ``engine``; None for the rights of this process."""
    return engine.confinement if isinstance(engine, SandboxedEngine) else None


def used_bytes(engine: Engine | None) -> int:
    """Return the anonymous memory of the engine's process above its idle memory; 0 if it has no process of its own."""
    return engine.used_bytes() if isinstance(engine, SandboxedEngine) else 0


def _fitting(port: Port, array: Array) -> Array:
    made: Array = np.asarray(array, port.dtype, order="C")
    if made.size != math.prod(port.shape):
        raise BundleError(
            f"{port.name} should be {port.dtype} {port.shape}, found {made.shape}: export the bundle again",
            port=port.name,
        )
    return made


def _state_numbers(process: EngineProcess, state: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of state tensors by port. RoundDeclined if they belong to a process that has ended."""
    if any(value.process is not process for value in state.values()):
        raise RoundDeclined(CRASHED, "the engine's process ended, and with it what it had computed")
    return {name: value.number for name, value in state.items()}


def open_sandboxed(
    name: str, threads: int, most_threads: int, *, pages: Path, memory_bytes: int, limits: Limits
) -> SandboxedEngine:
    """Start a confined process with the engine ``name``, and return the engine.

    Args:
        name: ``onnx`` or ``executorch``.
        threads: Number of threads that runs a graph.
        most_threads: Largest number of threads that a graph can be loaded with; 0: ``threads``.
        pages: The only folder that the process can write in.
        memory_bytes: Memory that the device offers to training.
        limits: Limits of time and disk space.

    Raises:
        ConfigError: There is no such engine, or it cannot be opened.
        RoundDeclined: The process ends while it opens the engine.
    """
    if name not in ENGINES or not 1 <= threads <= MOST_THREADS:
        raise ConfigError(
            f"an engine is one of {', '.join(ENGINES)} with 1 to {MOST_THREADS} threads, found {name!r} with {threads}",
            engine=name,
            threads=threads,
        )
    return SandboxedEngine(
        SandboxSettings(
            engine=name,
            threads=threads,
            most_threads=most_threads,
            pages=pages,
            step_s=limits.max_step_s,
            memory_bytes=memory_bytes,
            file_bytes=limits.store_bytes,
            readable=_find_readable(name),
        )
    )


def _find_readable(name: str) -> tuple[str, ...]:
    """Return the folders outside its package that the engine ``name`` must read: for ``executorch`` that of its binding.

    Compiles a missing binding first, because the sandboxed process may not start a compiler.
    """
    if name != "executorch":
        return ()
    from edgefl_device.engine.executorch.build import binding, find_wheel

    return (str(binding(find_wheel(), lambda _: None).parent),)
