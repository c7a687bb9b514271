"""The whole server against a real Mosquitto, with scripted devices."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round, Status, Task, encode
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.events import DeviceSeen, Finished, RoundClosed, RoundOpened, Waiting
from tests.conftest import Mosquitto
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    MakeDevice,
    MakePlan,
    ScriptedDevice,
    Serve,
    assert_mean,
    chunks_of,
    fetch,
    progress,
    retained,
    silent,
    trained,
    update_for,
)


def test_a_mixed_fleet_trains_to_the_end(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    for name in ("strong-0", "strong-1", "weak-0"):
        device(name)
    server = serve(min_devices=3)
    rounds = [server.wait_for(RoundClosed) for _ in range(2)]
    finished = server.wait_for(Finished)
    server.join()

    last = [("strong-0", "strong", 2), ("strong-1", "strong", 2), ("weak-0", "weak", 2)]
    assert_mean(tmp_path / "out", last)
    assert [(closed.round, closed.reports, closed.rejected) for closed in rounds] == [(1, 3, 0), (2, 3, 0)]
    assert all(closed.accuracy == 0.5 and closed.train_loss == 1.5 for closed in rounds)
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert finished.weights_sha256 == digest == rounds[-1].weights_sha256


def test_missing_chunks_are_asked_for(device: MakeDevice, serve: Any, limits: Limits) -> None:
    gappy = device("strong-0", silent)
    serve(rounds=1)
    opened, task = gappy.wait_open(), gappy.tasks.get(timeout=PATIENCE_S)
    data = encode(update_for("strong-0", task, opened.model_version, trained("strong-0", task)))
    last = len(data) // limits.chunk_bytes
    gappy.send(data, task, indices=[0, last])
    ack = gappy.acks.get(timeout=PATIENCE_S)
    gappy.send(data, task, indices=ack.missing)
    assert (ack.status, ack.missing) == ("missing", list(range(1, last)))
    assert gappy.acks.get(timeout=PATIENCE_S).status == "accepted"


def test_a_round_with_too_few_reports_leaves_the_model_unchanged(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    late = device("strong-1", silent)
    server = serve(rounds=2, min_devices=2, min_reports=2, deadline_s=2.0)
    first, closed = late.wait_open(), server.wait_for(RoundClosed)
    second = late.wait_open(round_number=2)
    assert closed.outcome == "abandoned" and "1 of 2 devices" in closed.text
    assert (second.base, second.model_version, second.units) == (0, first.model_version, first.units)
    with pytest.raises(AssertionError, match="none has trained the model"):
        server.join()


def test_a_device_fetches_what_is_announced_and_old_weights_go(
    device: MakeDevice, serve: Any, connect: Any, mosquitto: Mosquitto, federation: str
) -> None:
    strong = device("strong-0", silent)
    server = serve(rounds=2)
    first, task = strong.wait_open(), strong.tasks.get(timeout=PATIENCE_S)
    fetched = fetch(connect(mosquitto.address), federation, first.units["body"][0])
    strong.report(task, first)
    second = strong.wait_open(round_number=2)
    strong.report(strong.tasks.get(timeout=PATIENCE_S), second)
    server.join()
    np.testing.assert_array_equal(tensors.load(fetched)["body.weight"], WEIGHTS["body.weight"])
    assert first.offers == second.offers and first.model_version != second.model_version
    left = retained(connect(mosquitto.address), federation)
    assert not any(first.units["body"][0].sha256 in topic for topic in left)
    bundles = second.offer("onnx").bundles.values()
    weights = [ref for refs in strong.done().units.values() for ref in refs]
    chunks = sum(ref.count for ref in [*weights, *bundles])
    assert sum("/blobs/" in topic for topic in left) == chunks + len(bundles)


def test_a_device_that_sends_is_online(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    one = device("strong-0", silent)
    server = serve(rounds=1, min_devices=1)
    server.wait_for(RoundOpened)
    one.say(one.mine.status, Status(online=False), retain=True)
    one.say(one.mine.progress, progress("s" * 99, tier="t" * 99))
    seen = server.wait_for(DeviceSeen)
    assert (seen.tier, len(seen.stage)) == ("strong", 64), "its tier is what the server says"
    server.stop()
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        assert journal.execute("select online from devices").fetchall() == [(1,)]


def test_a_listener_that_fails_does_not_end_the_run(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    def fail(event: Any) -> None:
        raise ValueError(event)

    device("strong-0")
    serve(plan_of(), hear=fail).join()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_people_hear_of_devices_and_of_waiting(device: MakeDevice, serve: Any) -> None:
    server = serve(rounds=1, min_devices=2)
    assert (first := server.wait_for(Waiting)).known == 0 and first.needed == 2
    device("strong-0")
    assert server.wait_for(Waiting).known == 1
    device("weak-0")
    assert server.wait_for(RoundOpened).devices == ("strong-0", "weak-0")
    seen = server.wait_for(DeviceSeen, lambda event: event.device == "weak-0")
    assert (seen.tier, seen.stage, seen.loss) == ("weak", "reported", 1.5) and seen.up_bytes > 0
    # As the device's own profile has it (tests/server/fleet.py), and what the broker's packets took.
    assert (seen.forward_ms, seen.step_ms, seen.idle_bytes, seen.peak_bytes) == (1, 1, 1, 2)
    assert (seen.down_bytes, seen.down_wire_bytes) == (3, 0) and seen.up_wire_bytes > seen.up_bytes
    server.wait_for(Finished)


def test_traffic_of_late_copies_counts_in_the_next_round(device: MakeDevice, serve: Any) -> None:
    one, other = device("strong-0", silent), device("strong-1", silent)
    server = serve(rounds=2, min_devices=2)
    for number in (1, 2):
        opened = one.wait_open(round_number=number)
        tasks = {each: each.tasks.get(timeout=PATIENCE_S) for each in (one, other)}
        for answers in (1, 2):  # a second copy is answered at its first and at its last chunk
            one.report(tasks[one], opened)
            assert {one.acks.get(timeout=PATIENCE_S).status for _ in range(answers)} == {"accepted"}
        other.report(tasks[other], opened)
        assert other.acks.get(timeout=PATIENCE_S).status == "accepted"
        closed = server.wait_for(RoundClosed)
        sizes = {each: _sizes(each, tasks[each], opened) for each in (one, other)}
        late = sizes[other] if number == 2 else PublishTraffic()
        expected = sizes[one] + sizes[one] + sizes[other] + late
        assert (closed.reports, closed.rejected) == (2, 0), "each device counts once"
        assert (closed.up_bytes, closed.up_wire_bytes) == (expected.payload, expected.wire)
        assert (closed.down_bytes, closed.down_wire_bytes) == (6, 0), "as the devices say"
        if number == 1:
            other.report(tasks[other], opened)
            assert {other.acks.get(timeout=PATIENCE_S).status for _ in range(2)} == {"accepted"}


def _sizes(device: ScriptedDevice, task: Task, opened: Round) -> PublishTraffic:
    """What an honest update of the device takes."""
    data = encode(update_for(device.name, task, opened.model_version, trained(device.name, task)))
    found = PublishTraffic()
    for chunk in chunks_of(data, task.nonce, device.limits.chunk_bytes):
        found += PublishTraffic.of(device.mine.update(task.round, chunk.index), len(encode(chunk)), qos=1)
    return found
