"""Versions that wait for nobody, over a real broker: late updates count by their age, and what has a journal is repeated."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.simulator.replay import Replay, ReplayedRound
from edgefl.wire import tensors
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, Round, Task
from edgefl.wire.tensors import Arrays
from edgefl_server.events import RoundClosed
from edgefl_server.run_spec import DownlinkSpec, RunSpec
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import store_at
from tests.conftest import Mosquitto
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    MakeDevice,
    ScriptedDevice,
    Serve,
    plan_for,
    silent,
    trained,
)
from tests.server.killed.kill_me import VERSIONS, serve_versions, versions_of
from tests.server.killed.victim import Victim
from tests.support.errors import ConfigError, StoreError, refuses


class Worker:
    """A scripted device that answers when it is told to."""

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        self._known: list[Round] = []
        self._had: set[str] = set()

    def task(self) -> Task:
        """The next one; a server that has lost its connection sends one again."""
        while (task := self.device.tasks.get(timeout=PATIENCE_S)).nonce in self._had:
            pass
        self._had.add(task.nonce)
        return task

    def announced(self, number: int) -> Round:
        """What is announced of a round, once it is."""
        while True:
            for each in reversed(self._known):
                if (own := each.at(number)) is not None:
                    return own
            self._known.append(self.device.rounds.get(timeout=PATIENCE_S))

    def report(self, task: Task) -> Ack:
        self.device.report(task, self.announced(task.round))
        return self.word_on(task)

    def word_on(self, task: Task) -> Ack:
        """The server's; on an update that it does not take it says so twice."""
        while (ack := self.device.acks.get(timeout=PATIENCE_S)).nonce != task.nonce:
            pass
        return ack

    def accepted(self, task: Task | None = None) -> Task:
        """Its task answered, and accepted."""
        own = task or self.task()
        assert self.report(own).status == "accepted"
        return own


@pytest.fixture
def plan(federation: str, limits: Limits) -> RunSpec:
    rules = {"rounds": 3, "min_devices": 3, "buffer": 2, "concurrency": 3, "max_staleness": 2}
    return replace(plan_for(federation, limits, **rules), keep_updates=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def workers(device: MakeDevice) -> tuple[Worker, Worker, Worker]:
    first, second, third = (Worker(device(name, silent)) for name in ("strong-0", "strong-1", "weak-0"))
    return first, second, third


def repeated(plan: RunSpec, out: Path, scratch: Path, initial: Arrays = WEIGHTS) -> list[ReplayedRound]:
    journal = Journal(f"sqlite:///{out / 'journal.sqlite'}", plan.federation, store_at(str(out / "updates")))
    run = journal.latest_run()
    assert run is not None
    try:
        return list(Replay(plan, journal, run, initial, scratch, "cpu").rounds())
    finally:
        journal.close()


def step(old: Arrays, *changes: tuple[float, Arrays, Arrays]) -> Arrays:
    """The next version, in float64: of (share, update, the weights that it began from)."""
    new = {}
    for name, before in old.items():
        parts = [
            share * (sent[name].astype(np.float64) - began[name])
            for share, sent, began in changes
            if name in sent
        ]
        new[name] = (before + sum(parts) / len(parts)).astype(np.float32) if parts else before
    return new


def of(device: str, task: Task) -> Arrays:
    return trained(device, task)


def test_late_changes_count_by_their_age_from_what_they_began_with(
    workers: tuple[Worker, Worker, Worker], serve: Serve, plan: RunSpec, out: Path, tmp_path: Path
) -> None:
    a, b, c = workers
    server = serve(plan)
    first, second, third = a.accepted(), b.task(), c.task()
    again = a.task()
    assert (again.round, again.nonce != first.nonce) == (1, True)
    b.accepted(second)
    of_two = b.task()
    assert of_two.round == 2 and set(c.announced(2).live) == {1}  # type: ignore[arg-type]
    c.accepted(third)
    b.accepted(of_two)
    of_three = b.task()
    a.accepted(again)
    b.accepted(of_three)
    server.join()

    v1 = WEIGHTS
    v2 = step(v1, (1, of("strong-0", first), v1), (1, of("strong-1", second), v1))
    v3 = step(v2, (2**-0.5, of("weak-0", third), v1), (1, of("strong-1", of_two), v2))
    v4 = step(v3, (3**-0.5, of("strong-0", again), v1), (1, of("strong-1", of_three), v3))
    model = tensors.load((out / "model.safetensors").read_bytes())
    for name, value in v4.items():
        np.testing.assert_allclose(model[name], value, atol=2e-6)
    told = server.seen_of(RoundClosed)
    assert [(each.outcome, each.reports) for each in told] == [("closed", 2)] * 3

    rounds = repeated(plan, out, tmp_path / "again")
    assert [(each.same, each.updates, each.late) for each in rounds] == [
        (True, 2, 0),
        (True, 2, 1),
        (True, 2, 1),
    ]


def test_an_update_that_is_too_late_is_refused(
    workers: tuple[Worker, Worker, Worker], serve: Serve, plan: RunSpec
) -> None:
    a, b, c = workers
    serve(replace(plan, rules=replace(plan.rules, max_staleness=0)))
    late = c.task()
    opened = c.announced(1)
    a.accepted()
    b.accepted()
    c.accepted()
    c.device.report(late, opened)
    ack = c.word_on(late)
    assert (ack.status, ack.reason) == ("rejected", "stale") and "round.max_staleness" in ack.text


@pytest.mark.slow
def test_a_late_device_gets_another_task(device: MakeDevice, serve: Serve, plan: RunSpec) -> None:
    alone = Worker(device("strong-0", silent))
    rules = replace(plan.rules, deadline_s=1.0, min_devices=1, buffer=1, rounds=1)
    server = serve(replace(plan, rules=rules))
    first, _second = alone.task(), alone.task()
    ack = alone.report(first)
    assert (ack.status, ack.reason) == ("rejected", "expired") and "limits.round_deadline_s" in ack.text
    while alone.report(alone.task()).status != "accepted":  # it is given another one each second
        pass
    server.join()


@pytest.mark.parametrize("encoding", ["float32", "float16"])
def test_a_server_restarted_at_any_answer_gives_the_same_bits(
    workers: tuple[Worker, Worker, Worker],
    serve: Serve,
    plan: RunSpec,
    out: Path,
    tmp_path: Path,
    encoding: Any,
) -> None:
    a, b, c = workers
    rounded = replace(plan, downlink=DownlinkSpec(encoding=encoding))
    server = serve(rounded)
    tasks = {each: each.task() for each in workers}
    for answering in (a, b, c, b, a):
        server.stop()
        server = serve(rounded)
        answering.accepted(tasks[answering])
        tasks[answering] = answering.task()
    b.accepted(tasks[b])
    server.join()
    rounds = repeated(rounded, out, tmp_path / "again")
    assert [(each.same, each.updates) for each in rounds] == [(True, 2)] * 3
    assert [each.late for each in rounds] == [0, 1, 1]


def test_a_server_that_is_killed_counts_each_update_once(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, tmp_path: Path
) -> None:
    for name in ("strong-0", "strong-1", "weak-0", "weak-1"):
        device(name)
    victim = Victim(mosquitto.port, federation, tmp_path / "killed", serve=serve_versions)
    victim.kill_at(lambda event: event["event"] == "deviceseen")
    victim.kill_at(lambda event: event["event"] == "roundopened" and event["round"] == 3)
    rounds, model = victim.finish()
    assert rounds[-1]["round"] == VERSIONS and rounds[-1]["reports"] == 3
    again = repeated(versions_of(federation), tmp_path / "killed", tmp_path / "again")
    assert [(each.same, each.updates) for each in again] == [(True, 3)] * VERSIONS
    assert tensors.dump(again[-1].weights) == model


def test_what_was_changed_after_the_run_is_found(
    workers: tuple[Worker, Worker, Worker], serve: Serve, plan: RunSpec, out: Path, tmp_path: Path
) -> None:
    a, b, _ = workers
    server = serve(replace(plan, rules=replace(plan.rules, rounds=1)))
    a.accepted()
    b.accepted()
    server.join()
    begun = WEIGHTS | {"body.bias": WEIGHTS["body.bias"] + np.float32(0.5)}
    with pytest.raises(ConfigError, match="began from model"):
        repeated(plan, out, tmp_path / "other", begun)
    with pytest.raises(ConfigError, match="another configuration"):
        repeated(replace(plan, digest="e" * 64), out, tmp_path / "other")
    (stored,) = (out / "updates").iterdir()
    data = bytearray(stored.read_bytes())
    at = data.index(
        of("strong-0", Task(run="", round=1, tier="strong", seed=0, nonce=""))["body.weight"].tobytes()
    )
    data[at] ^= 1
    stored.write_bytes(data)
    with refuses(StoreError, device="strong-0", round=1):
        repeated(plan, out, tmp_path / "flipped")
    data[at] ^= 1
    stored.write_bytes(data)
    with closing(sqlite3.connect(out / "journal.sqlite")) as journal:
        journal.execute("UPDATE updates SET share = 0.5 WHERE device = 'strong-1'")
        journal.commit()
    assert [each.same for each in repeated(plan, out, tmp_path / "shared")] == [False]
    stored.unlink()
    with pytest.raises(StoreError, match=r"round-00000001.bin is not there: .*round\.keep_updates"):
        repeated(plan, out, tmp_path / "gone")
