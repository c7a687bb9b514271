"""Runs of a dozen scripted devices, with workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import EventSink
from edgefl_server.shards.messages import WorkerMessage
from edgefl_server.shards.pool import WorkerOptions
from edgefl_server.shards.worker import WorkerSettings
from edgefl_server.workers.process import ProcessHandle, ProcessLauncher
from edgefl_server.workers.protocol import WorkerLauncher
from tests.server.fleet import RunningServer, plan_for
from tests.server.forked import ForkedLauncher

NAMES = tuple(f"strong-{number}" for number in range(8)) + tuple(f"weak-{number}" for number in range(4))


class KnownWorkers:
    """Launcher that keeps the handles by the workers' numbers.

    The first worker of each number in ``silenced_at`` is killed when it sends a message of that type, which is lost.
    """

    def __init__(
        self,
        silenced_at: Mapping[int, type[WorkerMessage]] | None = None,
        launcher: ProcessLauncher | None = None,
    ) -> None:
        self.silenced_at = silenced_at or {}
        self._launcher = launcher or ForkedLauncher()
        self.handles: dict[int, list[ProcessHandle]] = {}
        self.silenced: set[int] = set()

    def launch(self, settings: WorkerSettings, sink: EventSink[WorkerMessage]) -> ProcessHandle:
        handles = self.handles.setdefault(settings.worker, [])
        if not handles:
            sink = _SilencingSink(self, settings.worker, sink)
        handles.append(self._launcher.launch(settings, sink))
        return handles[-1]

    def pid(self, worker: int) -> int:
        """Return the process of the newest worker with that number."""
        return self.handles[worker][-1].pid


class _SilencingSink:
    def __init__(self, workers: KnownWorkers, number: int, sink: EventSink[WorkerMessage]) -> None:
        self._workers, self._number, self._sink = workers, number, sink

    def put(self, message: WorkerMessage, /) -> None:
        kind = self._workers.silenced_at.get(self._number)
        if kind is not None and isinstance(message, kind):
            self._workers.silenced.add(self._number)
            os.kill(self._workers.handles[self._number][0].pid, signal.SIGKILL)
        else:
            self._sink.put(message)


def started(
    federation: str,
    address: Any,
    out: Path,
    limits: Limits,
    *,
    workers: int = 0,
    launcher: WorkerLauncher | None = None,
    updates: str = "",
    database: str = "",
    **rules: Any,
) -> RunningServer:
    """A server with so many workers for all of :data:`NAMES`."""
    plan = plan_for(federation, limits, **{"min_devices": len(NAMES), "deadline_s": 60.0, **rules})
    options = WorkerOptions(workers, launcher or ForkedLauncher(), updates)
    return RunningServer.start(plan, address, out, workers=options, database=database)


def model_of(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()
