"""What devices meet that send to workers: turns, signatures, and rounds that close before they were heard."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.config import load
from edgefl.setup.runs import run_digest
from edgefl.wire import tensors
from edgefl.wire.keys import FOREVER, KeyPair
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.envelope import MessageCounter, MessageSigner, unsigned
from edgefl.wire.mqtt.events import EventSink
from edgefl.wire.mqtt.messages import UpdateChunk, encode
from edgefl_server.aggregate.robust import RobustRule
from edgefl_server.events import Noted, Rejected, RoundClosed, RoundOpened, UpdateAccepted, Warned
from edgefl_server.identity.registry import DeviceKey, Registry
from edgefl_server.shards.messages import RoundSum, UpdatesHandled, WorkerMessage, shard_of
from edgefl_server.shards.pool import WorkerOptions
from edgefl_server.shards.worker import KeyRing, UnknownDevice, WorkerSettings
from edgefl_server.workers.process import ProcessHandle
from tests.conftest import Mosquitto
from tests.e2e.tap import Direction, Tap
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    RunningServer,
    ScriptedDevice,
    expected_mean,
    plan_for,
    trained,
    update_for,
)
from tests.server.forked import ForkedLauncher
from tests.server.shards.fleets import NAMES, model_of, started
from tests.support.errors import ConfigError, IdentityError, StoreError, refuses

Fleet = Callable[..., tuple[RunningServer, dict[str, ScriptedDevice]]]


@pytest.fixture
def fleet(mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path) -> Iterator[Fleet]:
    devices: dict[str, ScriptedDevice] = {}
    running: list[RunningServer] = []

    def start(answer: Any = None, signing: bool = False, few: int = len(NAMES), **options: Any) -> Any:
        known = msgspec.structs.replace(limits, **options.pop("limits", {}))
        for name in NAMES[:few]:
            seal = unsigned
            if signing:
                numbers = MessageCounter()
                seal = MessageSigner(KeyPair(tmp_path / f"{name}.key"), numbers).seal
            devices[name] = ScriptedDevice(mosquitto.address, federation, name, limits, answer, seal=seal)
        address = options.pop("address", mosquitto.address)
        running.append(started(federation, address, tmp_path / "out", known, workers=2, **options))
        return running[0], devices

    yield start
    for each in devices.values():
        each.stop()
    for server in running:
        if server.thread and server.thread.is_alive():
            server.stop()


def test_each_update_is_counted_or_refused(fleet: Fleet, tmp_path: Path, limits: Limits) -> None:
    """Twelve answer at once, and six are wanted: workers accept what the server has not counted yet."""
    server, devices = fleet(rounds=1, fraction=0.5, over_selection=2.0)
    closed = server.wait_for(RoundClosed)
    server.join()

    words: dict[str, set[str]] = {}
    for name, device in devices.items():
        words[name] = set()  # who sent after the server's end hears nothing
        with suppress(queue.Empty):
            words[name].add(device.acks.get(timeout=2.0).status)
            while True:
                words[name].add(device.acks.get(timeout=0.2).status)
    accepted = [name for name, said in words.items() if said == {"accepted"}]
    assert all(said in ({"accepted"}, {"rejected"}, set()) for said in words.values()), words
    assert len(accepted) == closed.reports >= 6, words
    model = tensors.load(model_of(tmp_path / "out"))
    for name, value in expected_mean(WEIGHTS, [(each, each[:-2], 1) for each in accepted]).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


class _SlowLink(Tap):
    """Link to the broker whose answers take a while."""

    def _read(self, data: bytes, direction: Direction) -> bytes:
        if direction == "out":
            time.sleep(0.03)
        return super()._read(data, direction)


class _LateResults:
    """Launcher that delivers the results of all but three accepted updates just before the sums of the round."""

    def __init__(self) -> None:
        self._kept: list[tuple[EventSink[WorkerMessage], UpdatesHandled]] = []
        self._lock = threading.Lock()

    def launch(self, settings: WorkerSettings, sink: EventSink[WorkerMessage]) -> ProcessHandle:
        return ForkedLauncher().launch(settings, _LateSink(self, sink))

    def put(self, message: WorkerMessage, sink: EventSink[WorkerMessage]) -> None:
        with self._lock:
            if isinstance(message, UpdatesHandled) and any(
                reply.ack.status == "accepted" for reply in message.replies
            ):
                for reply, answer in zip(message.replies, message.answers, strict=True):
                    self._kept.append((sink, UpdatesHandled(message.round, (reply,), (answer,))))
                message = UpdatesHandled(message.round, events=message.events)
                self._deliver(3 if len(self._kept) == len(NAMES) else 0)
            elif isinstance(message, RoundSum):
                self._deliver(len(self._kept))
            sink.put(message)

    def _deliver(self, count: int) -> None:
        now, self._kept = self._kept[:count], self._kept[count:]
        for sink, progressed in now:
            sink.put(progressed)


class _LateSink:
    def __init__(self, results: _LateResults, sink: EventSink[WorkerMessage]) -> None:
        self._results, self._sink = results, sink

    def put(self, message: WorkerMessage, /) -> None:
        self._results.put(message, self._sink)


def test_a_device_hears_of_its_update_that_the_last_round_counts(fleet: Fleet, mosquitto: Mosquitto) -> None:
    """The server learns of the last updates after the round closed, and then has nothing else to do."""
    link = _SlowLink(mosquitto.address)
    server, devices = fleet(
        rounds=1,
        fraction=0.25,
        over_selection=4.0,
        launcher=_LateResults(),
        limits={"max_inflight": 1},
        address=link.address,
    )
    assert server.wait_for(RoundClosed).reports == len(NAMES)
    server.join()
    link.close()

    assert {device.acks.get(timeout=PATIENCE_S).status for device in devices.values()} == {"accepted"}


def test_signed_updates_come_by_turns(fleet: Fleet, tmp_path: Path, limits: Limits) -> None:
    def forged_first(device: ScriptedDevice, task: Any, opened: Any) -> None:
        if task.ask is True and device.name == "strong-0":
            update = update_for(device.name, task, opened.model_version, trained("somebody", task))
            data = encode(update)
            forged = UpdateChunk(nonce=task.nonce, sha256="0" * 64, index=0, count=1, size=9, data=data[:9])
            topic = device.mine.update(task.round, 0, shard_of(device.name))
            device.session.publish(topic, unsigned(topic, forged))
        device.report(task, opened)

    server, _ = fleet(forged_first, signing=True, rounds=1, limits={"asked_bytes": 6000})
    forged = server.wait_for(Rejected)
    closed = server.wait_for(RoundClosed)
    server.join()

    assert (forged.device, forged.reason) == ("strong-0", "unsigned")
    assert closed.reports == len(NAMES)
    assert {event.device for event in server.seen_of(UpdateAccepted)} == set(NAMES)


def test_more_workers_than_devices_are_told(fleet: Fleet) -> None:
    server, _ = fleet(few=1, rounds=1, min_devices=1)
    noted = server.wait_for(Noted, lambda event: "workers" in event.text)
    assert server.wait_for(RoundClosed).reports == 1
    assert noted.text == "there are 2 workers, and round 1 has 1 devices: some have nothing to do"


def test_an_unreadable_list_ends_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, keys = count(1), Registry.keys

    def sometimes(registry: Registry, device: str) -> list[DeviceKey]:
        if next(calls) % 7 == 0:
            raise StoreError("the list of devices is away")
        return keys(registry, device)

    server, _ = fleet(rounds=2)
    server.wait_for(RoundOpened)  # all have said hello
    monkeypatch.setattr(Registry, "keys", sometimes)
    assert server.wait_for(RoundClosed, lambda event: event.round == 2).reports == len(NAMES)
    server.join()
    assert any("the list of devices is away" in warned.text for warned in server.seen_of(Warned))


def test_a_ring_lets_in_what_the_keys_of_a_device_sign(tmp_path: Path) -> None:
    pair, other = KeyPair(tmp_path / "own"), KeyPair(tmp_path / "other")
    chunk = UpdateChunk(nonce="ab", sha256="0" * 64, index=0, count=1, size=1, data=b"x")
    sealed = MessageSigner(pair, MessageCounter()).seal("topic", chunk)
    stranger = MessageSigner(other, MessageCounter()).seal("topic", chunk)
    now = 100.0
    ring = KeyRing(enrolled=False, clock=lambda: now)
    key = DeviceKey(
        device="d", key=pair.public, state="active", source="first-use", until=FOREVER, added_at=0.0
    )

    with pytest.raises(UnknownDevice):
        ring.open("d", "topic", sealed)
    ring.update({"d": ()})
    assert ring.open("d", "topic", encode(chunk)) == chunk
    ring.update({"d": (key,)})
    assert ring.open("d", "topic", sealed) == chunk
    for payload, reason in ((encode(chunk), "unsigned"), (stranger, "wrong-key")):
        with refuses(IdentityError, reason=reason):
            ring.open("d", "topic", payload)
    with refuses(IdentityError, reason="wrong-signature"):
        ring.open("d", "elsewhere", sealed)
    for changed, reason in (
        ({"state": "revoked"}, "revoked-key"),
        ({"state": "retired", "until": 99}, "old-key"),
    ):
        ring.update({"d": (msgspec.structs.replace(key, **changed),)})
        with refuses(IdentityError, reason=reason):
            ring.open("d", "topic", sealed)
    ring.update({"d": None})
    with pytest.raises(UnknownDevice):
        ring.open("d", "topic", sealed)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "multi_krum"])
def test_rules_that_look_at_all_updates_are_refused(federation: str, limits: Limits, rule: Any) -> None:
    plan = plan_for(federation, limits)
    plan = replace(
        plan, aggregate=replace(plan.aggregate, rule=RobustRule(rule, 0.0 if rule == "median" else 0.2))
    )
    with refuses(ConfigError, rule=rule):
        WorkerOptions(2).check(plan)
    WorkerOptions(1).check(plan)
    with pytest.raises(ConfigError, match=f"aggregate.rule {rule} looks at all updates"):
        load(None, {"server.workers": 2, "aggregate.rule": rule, "aggregate.trim": 0.2})


def test_the_table_server_is_checked_and_not_part_of_the_digest() -> None:
    with pytest.raises(
        ConfigError, match=r"server.ray is where workers run: set server.workers to 2 or more"
    ):
        load(None, {"server.ray": "local"})
    with pytest.raises(ConfigError, match=r"a place without user and password: .*AWS_SECRET_ACCESS_KEY"):
        load(None, {"server.updates": "s3://me:secret@bucket/run"})
    with refuses(ConfigError, keys=["server.workers"]):
        load(None, {"server.workers": 65})
    assert run_digest(load(None, {"server.workers": 4, "server.updates": "s3://b/x"})) == run_digest(
        load(None)
    )
