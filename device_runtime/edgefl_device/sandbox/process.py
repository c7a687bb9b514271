"""One process of an engine: how it is started and spoken to, and in what words it is said to have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import numpy as np

from edgefl import wire
from edgefl.errors import BundleError, ConfigError, EdgeflError, RoundDeclined, StoreError
from edgefl.system.memory import status_bytes
from edgefl.wire.mqtt.messages import CRASHED, MALFORMED
from edgefl.wire.tensors import Array
from edgefl.wire.text import printable
from edgefl_device.sandbox.confine import Confinement
from edgefl_device.sandbox.frames import EnginePipe, PipeClosed, TookTooLong, widen
from edgefl_device.sandbox.messages import (
    Drop,
    EngineAnswer,
    EngineError,
    EngineOpened,
    EngineRequest,
    OpenEngine,
    Tensor,
)

_KEPT = (
    "PATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "HOME",
    "LANG",
    "LC_ALL",
    "SYSTEMROOT",
)
_MOST_WORDS = 300
_MOST_BYTES = 8192
_END_S = 1.0


def command(module: str, *arguments: str) -> list[str]:
    """Return the command ``python -m module arguments``; nothing is imported from the working folder (``-P``): a graph
    may have written there. Our packages are found as here, also where only this process knows the way to them."""
    ways = [str(Path(os.path.abspath(str(file))).parents[2]) for file in (__file__, wire.__file__)]
    begin = (
        f"import runpy, sys; sys.path[:0] = [each for each in {list(dict.fromkeys(ways))!r} if each not in sys.path]; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", begin, *arguments]


def environment() -> dict[str, str]:
    """Return the environment without the agent's variables, which may hold a password, but with those of Python and
    libraries. Relative paths keep their meaning."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    ways = os.environ.get("PYTHONPATH", "")
    if ways:
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, ways.split(os.pathsep)))
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


class Complaints:
    """Last lines of a process's standard error. A thread reads them, so that the process never blocks."""

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
        """Return the last error line of a finished process; "" if there is none."""
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
    """An engine's own error, in its words."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """``engine``, ``threads`` and ``most_threads`` as :func:`edgefl_device.engine.open_engine` takes them; ``pages``
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
    """One process of the engine. What is said to it is said by one thread at a time: the agent's worker."""

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
        self._complaints = Complaints(self.process.stderr)
        read_end, write_end = self.process.stdout.fileno(), self.process.stdin.fileno()
        widen(write_end)
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
        """Return the answer to a message. Errors of the engine are raised; RoundDeclined if the process ended, or took
        too long."""
        if self.ended:
            raise RoundDeclined(CRASHED, self.ended)
        self._line.until = time.monotonic() + (within_s or self._step_s)
        try:
            if self._gone or self._gone_graphs:
                state, graphs = self._gone[:], self._gone_graphs[:]
                del self._gone[: len(state)], self._gone_graphs[: len(graphs)]
                self._line.send(msgspec.msgpack.encode(Drop(state=tuple(state), graphs=tuple(graphs))))
            self._line.send(msgspec.msgpack.encode(word), arrays or [])
            answer: EngineAnswer = _decoder.decode(self._line.head())
        except (PipeClosed, TookTooLong, *MALFORMED) as error:
            raise self.over(error) from error
        if isinstance(answer, EngineError):
            kind = _ERRORS.get(answer.code)
            raise kind(answer.text) if kind else EngineFailed(answer.text)
        return answer

    def array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return the next array of an answer."""
        try:
            return self._line.array(dtype, shape)
        except (PipeClosed, TookTooLong, ValueError, TypeError, MemoryError) as error:
            raise self.over(error) from error

    def over(self, error: Exception) -> RoundDeclined:
        """End it, and say how it ended."""
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

    def hold(self, number: int, dtype: str, shape: tuple[int, ...]) -> Remote:
        """Return a handle of a state tensor in the process, which is dropped there with the handle."""
        remote = Remote(self, number, np.dtype(dtype).str, tuple(shape))
        weakref.finalize(remote, self._gone.append, number)
        return remote

    def forget_graph(self, number: int) -> None:
        self._gone_graphs.append(number)

    def used_bytes(self) -> int:
        """Return the anonymous memory above that of the idle process, 0 if the system does not report it."""
        return max(0, status_bytes("RssAnon", self.process.pid) - self._idle_bytes)

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
class Remote:
    """A tensor of the state, in the engine's process. ``dtype`` and ``shape`` are what it has to have by the manifest, or by
    what it was made of; ``dtype`` as ``numpy.dtype.str``."""

    process: EngineProcess
    number: int
    dtype: str
    shape: tuple[int, ...]

    def told(self, name: str) -> Tensor:
        """Return the description that an answer must have."""
        return Tensor(name=name, dtype=self.dtype, shape=self.shape)


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
    """Make a folder, without files of an earlier process."""
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
