"""The journal in a real Postgres, which several workers write to, and which may be away for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgefl.wire.mqtt.messages import Round, Task
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.events import RoundClosed, RoundOpened, UpdateAccepted, Warned
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import UpdateFiles
from tests.server.fleet import PATIENCE_S, MakeDevice, MakePlan, RunningServer, ScriptedDevice, Serve
from tests.server.shards.databases import Postgres
from tests.server.shards.fleets import NAMES, model_of
from tests.support.errors import StoreError, refuses


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    database = Postgres()
    yield database
    database.stop()


def test_a_round_outlives_a_database_that_goes_away(
    postgres: Postgres, fleet: Callable[..., RunningServer], federation: str, tmp_path: Path
) -> None:
    held: list[tuple[ScriptedDevice, Task, Round]] = []

    def last_ones_wait(device: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round == 2 and device.name.startswith("weak") and len(held) < 4:
            held.append((device, task, opened))
        else:
            device.report(task, opened)

    calm = fleet(f"{federation}-calm", "calm")
    server = fleet(federation, "out", last_ones_wait, workers=2, database=postgres.url)
    for _ in range(8):
        server.wait_for(UpdateAccepted, lambda event: event.round == 2)
    postgres.stop()
    for device, task, opened in held:
        device.report(task, opened)
    trouble = server.wait_for(Warned, lambda event: "the journal at postgresql" in event.text)
    postgres.start()
    closed = server.wait_for(RoundClosed, lambda event: event.round == 2)
    server.join()
    calm.join()

    assert "start that database again" in trouble.text and "tries again" in trouble.text
    assert closed.reports == len(NAMES)
    assert model_of(tmp_path / "out") == model_of(tmp_path / "calm")

    page = FolderSource(tmp_path / "out", postgres.url)  # which begins long after the run
    known = page.begin()
    page.close()
    assert known.problem == "" and [known.rounds[number].state for number in (1, 2)] == ["closed", "closed"]


def test_a_database_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with refuses(StoreError, url="postgresql+psycopg://me:***@127.0.0.1:1/x"):
        Journal("postgresql+psycopg://me:secret@127.0.0.1:1/x", "demo", UpdateFiles(tmp_path))


@pytest.mark.slow
def test_no_deadline_passes_while_a_database_is_away(
    postgres: Postgres, device: MakeDevice, serve: Serve, plan_of: MakePlan
) -> None:
    """A server without workers: devices are asked for what could not be kept as soon as it can be."""
    came, deadline_s = threading.Event(), 4.0

    def wait_for_it(device: ScriptedDevice, task: Task, opened: Round) -> None:
        if came.is_set():
            device.report(task, opened)

    phone = device("strong-0", wait_for_it)
    server = serve(plan_of(rounds=1, deadline_s=deadline_s), database=postgres.url)
    server.wait_for(RoundOpened)
    task, opened = phone.tasks.get(timeout=PATIENCE_S), phone.wait_open()
    postgres.stop()
    phone.report(task, opened)
    server.wait_for(Warned, lambda event: "the journal at postgresql" in event.text)
    time.sleep(deadline_s)
    came.set()
    postgres.start()
    closed = server.wait_for(RoundClosed)
    server.join()

    assert (closed.outcome, closed.reports) == ("closed", 1)
