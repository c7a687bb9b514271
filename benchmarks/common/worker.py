"""A process in which one engine trains, step by step, on command: what its steps take and what memory they need.

Lines of JSON: the parent writes ``{"steps": 5}`` and reads ``{"ms": [...], "cpu_ms": [...], "values": [...],
"peak_over_idle_bytes": ..., "anonymous_bytes": ...}``, of which values are those of steps that return numbers. A first line
from the worker says that it is ready. This file and what it imports need the standard library only, because
one of the engines lives in a Python environment of its own.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgefl_device.memory import anonymous_bytes, peak_bytes, reset_peak, resident_bytes, trim_memory

END_S = 10.0
"""Seconds a worker has to end by itself, then to obey SIGTERM, before it is killed."""


def serve(load: Callable[[], Callable[[], object]]) -> None:
    """Run the worker's side. ``load`` makes the engine ready and returns one training step.

    Call it when the libraries are imported and nothing has run: the memory of that moment counts as idle. What a
    library loads when it is first used belongs to what a step needs, for every engine alike.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)  # libraries that print must not disturb the conversation

        def tell(**values: object) -> None:
            stream.write(json.dumps(values) + "\n")
            stream.flush()

        trim_memory()
        idle, idle_anonymous = resident_bytes(), anonymous_bytes()
        reset_peak()
        start = time.perf_counter()
        step = load()
        tell(load_s=time.perf_counter() - start, idle_bytes=idle)
        for line in sys.stdin:
            steps = [_timed(step) for _ in range(json.loads(line)["steps"])]
            tell(
                ms=[ms for ms, _, _ in steps],
                cpu_ms=[cpu_ms for _, cpu_ms, _ in steps],
                values=[value for _, _, value in steps if isinstance(value, float)],
                peak_over_idle_bytes=peak_bytes() - idle,
                # Engines keep what a step took, so that it is here between two steps too.
                anonymous_bytes=anonymous_bytes() - idle_anonymous,
            )


def _timed(step: Callable[[], object]) -> tuple[float, float, object]:
    """Milliseconds by the clock, milliseconds of processors in all threads, and what the step returns."""
    start, cpu_start = time.perf_counter(), time.process_time()
    value = step()
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu_start), value


class WorkerFailed(Exception):
    """The worker ended; the text is the last line of what it wrote on its error output, and ``log`` is all of it."""

    def __init__(self, log: str, code: int) -> None:
        lines = log.strip().splitlines()
        super().__init__(lines[-1].strip() if lines else f"exit code {code}")
        self.log = log


@dataclass
class Worker:
    """The parent's side of one worker process. ``times`` and ``cpu_ms`` are those of the steps that were counted, and
    ``values`` what steps returned, counted or not."""

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

    def __enter__(self) -> Worker:
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

    @property
    def median_ms(self) -> float:
        """Median of the counted steps."""
        return round(statistics.median(self.times), 3)

    @property
    def fastest_ms(self) -> float:
        """Fastest of the counted steps."""
        return round(min(self.times), 3)

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Milliseconds of each of ``steps`` steps, remembered where they ``count``."""
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
