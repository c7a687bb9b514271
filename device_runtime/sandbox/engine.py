"""The agent's side: an engine whose graphs run in another process, that is started when it is needed and ended at rest."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from device_runtime.engine.base import Engine, Outputs, State
from device_runtime.sandbox.confine import Confinement
from device_runtime.sandbox.frames import Line, LineEnded, TookTooLong, patient, patient_to_write, widen
from device_runtime.sandbox.messages import (
    Answer,
    Done,
    Drop,
    Failed,
    Load,
    Open,
    Opened,
    Ran,
    Read,
    Run,
    Tensor,
    Tensors,
    Word,
    Written,
)
from device_runtime.sandbox.starting import Complaints, command, environment
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.errors import BundleError, ConfigError, EdgeflError, RoundDeclined, StoreError
from edgefl.wire.mqtt.messages import CRASHED, MALFORMED
from edgefl.wire.tensors import Array, Arrays

if TYPE_CHECKING:
    import subprocess

_START_S = 120.0
_ERRORS: dict[int, type[EdgeflError]] = {
    each.exit_code: each for each in (ConfigError, BundleError, StoreError)
}
_ADDRESS_BYTES = 4 << 30
"""Address space beside what the device offers: code, threads' stacks, and what an allocator sets apart and never uses."""
_decoder = msgspec.msgpack.Decoder(Answer)


class EngineFailed(RuntimeError):
    """An engine's own error, in its words."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """``engine``, ``threads`` and ``most_threads`` as :func:`device_runtime.engine.select.open_engine` takes them; ``pages``
    is the folder for what graphs keep on the disk. ``step_s``: the longest call. ``memory_bytes``, ``file_bytes`` and
    ``cpu_s`` bound the process; ``readable``: more files that it may read."""

    engine: str
    threads: int = 1
    most_threads: int = 0
    pages: Path | None = None
    step_s: float = 600.0
    memory_bytes: int = 0
    file_bytes: int = 0
    cpu_s: int = 0
    readable: tuple[str, ...] = ()

    def first_word(self) -> Open:
        return Open(
            engine=self.engine,
            threads=self.threads,
            most_threads=self.most_threads,
            pages=self._pages,
            confinement=self.confinement(),
        )

    def confinement(self) -> Confinement:
        """What is left to the process."""
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


class _Process:
    """One process of the engine. What is said to it is said by one thread at a time: the agent's worker."""

    def __init__(self, settings: SandboxSettings) -> None:
        import subprocess  # most devices wait without a process: they are to be small
        import tempfile

        self._step_s = settings.step_s
        self._until = time.monotonic() + _START_S
        self._place = None if settings.pages else tempfile.TemporaryDirectory(prefix="edgefl-engine-")
        if settings.pages:
            _make_empty(settings.pages)
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command("device_runtime.sandbox.child"),
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
        self._complaints = Complaints(self.process.stderr)
        read_end, write_end = self.process.stdout.fileno(), self.process.stdin.fileno()
        widen(write_end)
        self._line = Line(
            read_end,
            write_end,
            patient(read_end, lambda: self._until),
            patient_to_write(write_end, lambda: self._until),
        )
        self._gone: list[int] = []
        self._gone_graphs: list[int] = []
        self._graphs = 0
        self.ended = ""
        opened = self.ask(settings.first_word(), within_s=_START_S)
        assert isinstance(opened, Opened)
        self.opened = opened

    def ask(self, word: Word, arrays: list[Array] | None = None, *, within_s: float = 0.0) -> Answer:
        """The answer to a word. Its own errors come as they are; RoundDeclined if the process ended, or took too long."""
        if self.ended:
            raise RoundDeclined(CRASHED, self.ended)
        self._until = time.monotonic() + (within_s or self._step_s)
        try:
            self._forget()
            self._line.send(msgspec.msgpack.encode(word), arrays or [])
            answer: Answer = _decoder.decode(self._line.head())
        except (LineEnded, TookTooLong, *MALFORMED) as error:
            raise self.over(error) from error
        if isinstance(answer, Failed):
            kind = _ERRORS.get(answer.code)
            raise kind(answer.text) if kind else EngineFailed(answer.text)
        return answer

    def array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """The next array of an answer."""
        try:
            return self._line.array(dtype, shape)
        except (LineEnded, TookTooLong, ValueError, TypeError, MemoryError) as error:
            raise self.over(error) from error

    def over(self, error: Exception) -> RoundDeclined:
        """End it, and say how it ended."""
        with contextlib.suppress(Exception):
            self.process.wait(0.5 if isinstance(error, LineEnded) else 0.0)
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

    def hold(self, number: int, dtype: str, shape: tuple[int, ...]) -> _Remote:
        """A value of the state there, that is forgotten with what is returned."""
        remote = _Remote(self, number, np.dtype(dtype).str, tuple(shape))
        weakref.finalize(remote, self._gone.append, number)
        return remote

    def forget_graph(self, number: int) -> None:
        self._gone_graphs.append(number)

    def _forget(self) -> None:
        if self._gone or self._gone_graphs:
            state, graphs = self._gone[:], self._gone_graphs[:]
            del self._gone[: len(state)], self._gone_graphs[: len(graphs)]
            drop = Drop(state=tuple(state), graphs=tuple(graphs))
            self._line.send(msgspec.msgpack.encode(drop))

    def peak_bytes(self) -> int:
        """Highest resident set size so far; 0 where the system does not tell."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return 0

    def end(self) -> None:
        self.ended = self.ended or "the engine's process was ended"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(
                    self.process.pid, signal.SIGKILL
                )  # with what it may have started, also where it ended before
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
class _Remote:
    """A tensor of the state, in the engine's process. ``dtype`` and ``shape`` are what it has to have by the manifest, or by
    what it was made of; ``dtype`` as ``numpy.dtype.str``."""

    process: _Process
    number: int
    dtype: str
    shape: tuple[int, ...]

    def told(self, name: str) -> Tensor:
        """How it has to be announced."""
        return Tensor(name=name, dtype=self.dtype, shape=self.shape)


class SandboxedEngine:
    """Runs the graphs of another engine in a process that may little. Results are the same to the last bit."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._process: _Process | None = None
        self._peak = 0
        opened = self._running().opened
        self.name, self.version, self.format = opened.name, opened.version, opened.format
        self.thread_counts = opened.thread_counts
        self.missing = opened.missing
        """What the system does not confine, and why."""

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> SandboxedGraph:
        process = self._running()
        number = process.number_graph()
        word = Load(number=number, graph=graph, nbytes=len(artifact), threads=threads)
        answer = process.ask(
            word, [np.frombuffer(artifact, np.uint8)], within_s=max(_START_S, self._settings.step_s)
        )
        if not isinstance(answer, Done):
            raise process.over(ValueError("another answer"))
        return SandboxedGraph(process, graph, number)

    def read_state(self, state: State) -> Arrays:
        if not state:
            return {}
        process = next(iter(state.values())).process
        answer = process.ask(Read(state=_numbers(process, state)))
        expected = tuple(value.told(name) for name, value in state.items())
        if not isinstance(answer, Tensors) or answer.tensors != expected:
            raise process.over(ValueError("another answer"))
        return {each.name: process.array(each.dtype, each.shape) for each in expected}

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        process = self._running()
        made = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        word = Tensors(
            tensors=tuple(Tensor(name=name, dtype=a.dtype.str, shape=a.shape) for name, a in made.items())
        )
        answer = process.ask(word, list(made.values()))
        if not isinstance(answer, Written) or answer.state.keys() != made.keys():
            raise process.over(ValueError("another answer"))
        return {
            name: process.hold(number, made[name].dtype.str, made[name].shape)
            for name, number in answer.state.items()
        }

    @property
    def confinement(self) -> Confinement:
        """What is left to its process."""
        return self._settings.confinement()

    def peak_bytes(self) -> int:
        """Highest resident set size of the process of this round, or of the one before."""
        if self._process is not None:
            self._peak = self._process.peak_bytes() or self._peak
        return self._peak

    def rest(self) -> None:
        """Give back what waiting does not need: the process. The next round starts another."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _running(self) -> _Process:
        if self._process is None or self._process.ended:
            self._process = _Process(self._settings)
        return self._process


class SandboxedGraph:
    """A graph in the engine's process."""

    def __init__(self, process: _Process, graph: Graph, number: int) -> None:
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
        answer = process.ask(Run(number=self._number, state=_numbers(process, read)), arrays)
        if not isinstance(answer, Ran) or answer.state.keys() != self._keeps.keys():
            raise process.over(ValueError("another answer"))
        outputs = {port.name: process.array(port.dtype, port.shape) for port in self._gives}
        state = {
            name: process.hold(answer.state[name], port.dtype, port.shape)
            for name, port in self._keeps.items()
        }
        return Outputs(state, outputs)


def rest(engine: Engine) -> None:
    """Let an engine in a process of its own end that."""
    if isinstance(engine, SandboxedEngine):
        engine.rest()


def missing(engine: Engine) -> tuple[str, ...]:
    """Of an engine in a process of its own: what the system does not confine, and why."""
    return engine.missing if isinstance(engine, SandboxedEngine) else ()


def confinement(engine: Engine) -> Confinement | None:
    """What is left to whatever runs graphs in place of ``engine``; None where that is all that this process may."""
    return engine.confinement if isinstance(engine, SandboxedEngine) else None


def peak_bytes(engine: Engine) -> int:
    """Of an engine's own process; 0 where it has none."""
    return engine.peak_bytes() if isinstance(engine, SandboxedEngine) else 0


def _fitting(port: Port, array: Array) -> Array:
    made: Array = np.asarray(array, port.dtype, order="C")
    if made.size != math.prod(port.shape):
        raise BundleError(
            f"{port.name} should be {port.dtype} {port.shape}, found {made.shape}: export the bundle again",
            port=port.name,
        )
    return made


def _numbers(process: _Process, state: Mapping[str, Any]) -> dict[str, int]:
    """RoundDeclined for state of a process that ended."""
    if any(value.process is not process for value in state.values()):
        raise RoundDeclined(CRASHED, "the engine's process ended, and with it what it had computed")
    return {name: value.number for name, value in state.items()}


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
    """A folder without what an earlier process left there."""
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
