"""What the crew makes of what its workers say."""

from __future__ import annotations

import queue
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server import events
from edgefl_server.coordinator.machine import initial
from edgefl_server.coordinator.states import Outage, Rules
from edgefl_server.reception import Tellers
from edgefl_server.shards import process
from edgefl_server.shards.crew import Around, Crew
from edgefl_server.shards.messages import Died, FromWorker, Know, News, Order, Ready, Told, Troubled
from edgefl_server.shards.process import ProcessHand
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_files import UpdateFiles

WORKERS = 2


class Course:
    """A run between two rounds."""

    state, active = initial("v", 0.0), None

    def advance(self, event: object, hello: bytes | None = None) -> None:
        raise AssertionError("the crew gives news back")


class Silent:
    """A worker that says nothing by itself."""

    def __init__(self, told: Told, deliver: Callable[[News], None]) -> None:
        self.orders: list[Order] = []

    def tell(self, order: Order) -> None:
        self.orders.append(order)

    def kill(self) -> None: ...

    def end(self) -> None: ...


class Made:
    """A crew, its clock, and what people were told."""

    def __init__(self, folder: Path, hire: Any = Silent) -> None:
        self.now = 100.0
        self.troubles: list[str] = []
        self.told = told = Told(
            worker=0,
            workers=WORKERS,
            federation="demo",
            rules=Rules(run="r", seed=0, rounds=1, tiers=()),
            limits=Limits(),
            address=Address("127.0.0.1", 1),
            database=f"sqlite:///{folder}/journal.sqlite",
            updates=str(folder),
            enrolled=False,
        )
        tellers = Tellers(
            answer=lambda device, ack: None,
            emit=self.hear,
            troubled=lambda error: self.troubles.append(error.message),
            news=None,  # type: ignore[arg-type]
            announcer=None,  # type: ignore[arg-type]
        )
        around = Around(
            course=Course(),
            tellers=tellers,
            keys=lambda device: (),
            send_task=lambda opened, task: None,
            deliver=lambda said: None,
            persist=lambda write: write(),
            clock=lambda: self.now,
        )
        journal = Journal(told.database, told.federation, UpdateFiles(folder))
        self.crew = Crew(told, journal, hire, around)
        self.crew.step(self.now)

    def hear(self, event: events.Event) -> None:
        self.troubles.append(str(event))

    def says(self, worker: int, news: News) -> Any:
        return self.crew.heard(FromWorker(worker, 1, news))


def test_a_trouble_that_all_workers_have_is_one_outage(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert made.says(0, Ready(0)) is None and not made.crew.in_trouble
    made.says(0, Troubled("the database is away"))
    made.now += 10
    made.says(1, Troubled("the database is away"))
    made.now += 30
    assert made.says(1, Ready(0)) is None and made.crew.in_trouble
    made.now += 5
    assert made.says(0, Ready(0)) == Outage(45.0) and not made.crew.in_trouble


def test_a_machine_that_can_begin_no_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process.subprocess, "Popen", no_room)
    made = Made(tmp_path, ProcessHand)

    assert made.crew.in_trouble
    assert "no worker can be started: Resource temporarily unavailable" in made.troubles[0]
    with pytest.raises(StoreError, match=r"set server\.workers lower"):
        ProcessHand(None, lambda _: None)  # type: ignore[arg-type]


def test_a_worker_that_stands_still_does_not_hold_up_its_server(tmp_path: Path) -> None:
    made = Made(tmp_path)
    said: queue.SimpleQueue[News] = queue.SimpleQueue()

    def standing(there: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], pass_fds=[there.fileno()])

    hand = ProcessHand(made.told, said.put, standing, patience_s=0.2)
    for _ in range(40):  # more than a pipe takes
        hand.tell(Know({f"{n}": () for n in range(2000)}))

    assert said.get(timeout=300) == Died("was killed by signal 9")
