"""A C++ agent as a process that a test talks about."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.agents.cpp.build import program
from tests.wire.mqtt.events import PATIENCE_S


class CppAgent:
    """``edgefl-agent --json`` with these options, or a program that says the same. ``event`` waits for what it says."""

    def __init__(self, *options: object, command: Sequence[object] = ()) -> None:
        words = command or [program("edgefl-agent"), *options, "--json"]
        self.process = subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, federation: str, broker: object, data: Path, store: Path, *more: object) -> CppAgent:
        named = ("--id", "phone", "--tier", "weak", "--federation", federation, "--broker", broker)
        return cls(*named, "--data", data, "--store", store, *more)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def event(self, *names: str) -> dict[str, Any]:
        """The next event of one of these names."""
        deadline, seen = time.monotonic() + PATIENCE_S, []
        while (left := deadline - time.monotonic()) > 0:
            try:
                found = self._events.get(timeout=left)
            except queue.Empty:
                break
            if found["event"] in names:
                return found
            seen.append(f"{found['event']}: {found['text']}")
        raise AssertionError(f"no event {names}; there were {seen}")

    def left(self) -> list[str]:
        """Names of the events that nobody waited for."""
        return [str(self._events.get()["event"]) for _ in range(self._events.qsize())]

    def ended(self) -> int:
        """Wait for the end: the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        return code

    def stop(self) -> int:
        self.process.terminate()
        return self.ended()
