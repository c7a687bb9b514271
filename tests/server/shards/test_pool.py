"""The pool of workers: stalls, workers that cannot be started, and workers that hang."""

from __future__ import annotations

import queue
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.session import make_inbox
from edgefl_server.coordinator.machine import initial
from edgefl_server.coordinator.states import Outage
from edgefl_server.events import Event
from edgefl_server.identity.registry import Registry
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.reporter import EventReporter
from edgefl_server.shards.messages import Command, FromWorker, Ready, StorageFailed, UpdateKeys, WorkerMessage
from edgefl_server.shards.pool import WorkerPool
from edgefl_server.shards.worker import WorkerSettings
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.retry import RetryingJournal, RetryPolicy
from edgefl_server.storage.update_storage import UpdateFiles
from edgefl_server.workers import process
from edgefl_server.workers.process import ProcessLauncher
from edgefl_server.workers.protocol import Died
from tests.server.fleet import plan_for
from tests.support.listeners import CallingListener

WORKERS = 2
BETWEEN_ROUNDS = initial("v", 0.0)


class SilentWorkers:
    """Launcher of workers that send nothing by themselves, and their handle."""

    def launch(self, *_: Any) -> SilentWorkers:
        return self

    def send(self, command: Command) -> None: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...


class Pooled:
    """A pool, its clock, and what people read."""

    def __init__(self, folder: Path, launcher: Any) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        spec = plan_for("demo", Limits())
        self.settings = WorkerSettings(
            0,
            WORKERS,
            "demo",
            spec.rules,
            Limits(),
            Address("127.0.0.1", 1),
            f"sqlite:///{folder}/journal.sqlite",
            str(folder),
            False,
        )
        reporter = EventReporter(
            spec, CallingListener(self.events.append), MemoryPlans(folder, {}), lambda: self.now
        )
        journal = RetryingJournal(
            Journal(self.settings.database, "demo", UpdateFiles(folder)), RetryPolicy(0.1, reporter)
        )
        registry = Registry(folder / "devices.sqlite", "demo")
        inbox = make_inbox(Limits())
        self.pool = WorkerPool(self.settings, launcher, journal, registry, reporter, inbox, lambda: self.now)
        self.pool.step(BETWEEN_ROUNDS, self.now)

    def receive(self, worker: int, message: WorkerMessage) -> tuple[Any, ...]:
        return self.pool.handle(FromWorker(worker, 1, message), BETWEEN_ROUNDS).events


def test_a_storage_error_of_all_workers_is_one_outage(tmp_path: Path) -> None:
    pooled = Pooled(tmp_path, SilentWorkers())
    assert pooled.receive(0, Ready(0)) == () and not pooled.pool.is_stalled
    pooled.receive(0, StorageFailed("the database is away"))
    pooled.now += 10
    pooled.receive(1, StorageFailed("the database is away"))
    pooled.now += 30
    assert pooled.receive(1, Ready(0)) == () and pooled.pool.is_stalled
    pooled.now += 5
    assert pooled.receive(0, Ready(0)) == (Outage(45.0),) and not pooled.pool.is_stalled


def test_a_machine_without_room_stalls_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process.subprocess, "Popen", no_room)
    pooled = Pooled(tmp_path, ProcessLauncher())

    assert pooled.pool.is_stalled
    assert "no worker can be started: Resource temporarily unavailable" in str(pooled.events[0])
    with pytest.raises(StoreError, match=r"set server\.workers lower"):
        ProcessLauncher().launch(pooled.settings, queue.SimpleQueue())


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    class Hanging(ProcessLauncher):
        def start(self, there: socket.socket) -> subprocess.Popen[bytes]:
            return subprocess.Popen(["sleep", "600"], pass_fds=[there.fileno()])

    settings = Pooled(tmp_path, SilentWorkers()).settings
    messages: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
    handle = Hanging(send_s=0.2).launch(settings, messages)
    for _ in range(40):  # more than a pipe holds
        handle.send(UpdateKeys({f"{n}": () for n in range(2000)}))

    assert messages.get(timeout=300) == Died("was killed by signal 9")
