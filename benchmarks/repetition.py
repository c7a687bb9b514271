"""Repetition: worker processes that run steps on command, in turns, and the medians of what they measured.

Each side of a comparison is a process of its own, so that its memory is its own. The processes take turns in blocks of
equally many steps, so that other load on the machine affects all of them.

The parent writes lines of JSON such as ``{"steps": 5}`` and reads ``{"ms": [...], "cpu_ms": [...], "values": [...],
"peak_over_idle_bytes": ..., "anonymous_bytes": ...}``. Values come from steps that return numbers. The first line from the
worker reports that it is ready. Workers run in environments of other libraries too: this module imports the standard library
and :mod:`edgefl_device.host` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl_device.host import anonymous_bytes, peak_bytes, resident_bytes, trim_memory

END_S = 10.0
"""Seconds a worker has to end by itself, then after SIGTERM, before it is killed."""
WARM_UP = 3
BLOCK_MS = 1500.0
"""A block is as many steps as fit in this time, at least two and at most ``BLOCK_MOST``."""
BLOCK_MOST = 20


def serve(load: Callable[[], Callable[[], object]]) -> None:
    """Run the worker's side: load the engine, then run steps on command until standard input ends.

    Call it when the libraries are imported and nothing has run: the memory of that moment counts as idle. What a
    library loads on its first use belongs to what a step needs, for every engine alike.

    Args:
        load: prepares the engine and returns one training step.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)  # libraries that print must not disturb the conversation

        def send(**values: object) -> None:
            stream.write(json.dumps(values) + "\n")
            stream.flush()

        trim_memory()
        idle, idle_anonymous = resident_bytes(), anonymous_bytes()
        reset_peak()
        start = time.perf_counter()
        step = load()
        send(load_s=time.perf_counter() - start, idle_bytes=idle)
        for line in sys.stdin:
            steps = [_timed(step) for _ in range(json.loads(line)["steps"])]
            send(
                ms=[ms for ms, _, _ in steps],
                cpu_ms=[cpu_ms for _, cpu_ms, _ in steps],
                values=[value for _, _, value in steps if isinstance(value, float)],
                peak_over_idle_bytes=peak_bytes() - idle,
                # Engines keep the memory of a step, so that it is still there between two steps.
                anonymous_bytes=anonymous_bytes() - idle_anonymous,
            )


def reset_peak() -> None:
    """Restart the measurement of :func:`edgefl_device.host.peak_bytes`. Does nothing on systems other than Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _timed(step: Callable[[], object]) -> tuple[float, float, object]:
    """Run a step; return its milliseconds of time, of processors in all threads, and its value."""
    start, cpu_start = time.perf_counter(), time.process_time()
    value = step()
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu_start), value


class WorkerFailed(Exception):
    """Unexpected end of a worker. The text is the last line of its error output, ``log`` is all of it."""

    def __init__(self, log: str, code: int) -> None:
        lines = log.strip().splitlines()
        super().__init__(lines[-1].strip() if lines else f"exit code {code}")
        self.log = log


@dataclass
class StepWorker:
    """Parent's side of one worker process; entering the context starts it.

    Attributes:
        times: milliseconds of the counted steps.
        cpu_ms: processor milliseconds of the counted steps.
        values: numbers that steps returned, counted or not.
        peak: highest resident bytes over idle.
        anonymous: highest anonymous bytes over idle, seen after a block.
        load_s: seconds until the engine was ready.
        idle: resident bytes before the engine was loaded.
        end_s: seconds that the process has to end by itself.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    peak: int = 0
    anonymous: int = 0
    load_s: float = 0.0
    idle: int = 0
    end_s: float = END_S

    def __enter__(self) -> StepWorker:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            message = self._read()
        except BaseException:
            self._end()
            raise
        self.load_s, self.idle = float(message["load_s"]), int(message["idle_bytes"])
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def median_ms(self) -> float:
        """Median of the counted steps."""
        return median(self.times)

    @property
    def fastest_ms(self) -> float:
        """Fastest of the counted steps."""
        return round(min(self.times), 3)

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Run ``steps`` steps and return their milliseconds; keep them in ``times`` if they ``count``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"steps": steps}) + "\n")
            self._process.stdin.flush()
        message = self._read()
        self.peak = int(message["peak_over_idle_bytes"])
        self.anonymous = max(self.anonymous, int(message["anonymous_bytes"]))
        times: list[float] = message["ms"]
        self.values += message["values"]
        if count:
            self.times += times
            self.cpu_ms += message["cpu_ms"]
        return times

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            message: dict[str, Any] = json.loads(line)
            return message
        self._wait()
        self._log.seek(0)
        raise WorkerFailed(self._log.read(), self._process.returncode)

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._wait()
        self._process.stdout.close()
        self._log.close()

    def _wait(self) -> None:
        for insist in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(self.end_s)
                return
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()


def worker_of(module: str, *arguments: object, threads: int) -> StepWorker:
    """Return the process that runs our ``module`` on so many threads; enter it to start."""
    from benchmarks.machine import own_environment
    from edgefl.system.processes import module_command

    return StepWorker(module_command(module, *map(str, arguments)), own_environment(threads))


@contextlib.contextmanager
def running(workers: Iterable[StepWorker], what: str) -> Iterator[contextlib.ExitStack]:
    """Run ``workers`` inside the block. Raises EdgeflError if one of them ends by itself."""
    from edgefl.errors import EdgeflError

    with contextlib.ExitStack() as stack:
        try:
            for worker in workers:
                stack.enter_context(worker)
            yield stack
        except WorkerFailed as error:
            raise EdgeflError(f"a process that measures {what} ended: {error}", log=error.log) from error


class StepRunner(Protocol):
    """A process that runs steps: a :class:`StepWorker`, or a page in a browser."""

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Return the milliseconds of each step, which the runner keeps if they ``count``."""


def take_turns(
    workers: Sequence[StepRunner], repeat: int, say: Callable[[str], None], warm_up: int = WARM_UP
) -> None:
    """Warm up, then run ``repeat`` blocks of equally many steps on each worker, in turns.

    Args:
        workers: processes to compare.
        repeat: number of blocks.
        say: receives the progress as text.
        warm_up: steps of each worker before any counts.
    """
    say("warming up")
    slowest = max(min(worker.run(warm_up, count=False)) for worker in workers)
    run_blocks(workers, repeat, int(min(BLOCK_MOST, max(2, BLOCK_MS / slowest))), say)


def run_blocks(
    workers: Sequence[StepRunner], repeat: int, steps: int, say: Callable[[str], None] = lambda _: None
) -> None:
    """Run ``repeat`` blocks of ``steps`` counted steps on each worker, in turns."""
    for block in range(1, repeat + 1):
        say(f"block {block} of {repeat}, {steps} steps each")
        for worker in workers:
            worker.run(steps)


def median(values: Sequence[float], digits: int = 3) -> float:
    """Return the rounded median."""
    return round(statistics.median(values), digits)


def ratio(ours: float, theirs: float | None, digits: int = 4) -> float | None:
    """Return the rounded quotient; None if nothing was measured on the other side."""
    return round(ours / theirs, digits) if theirs else None
