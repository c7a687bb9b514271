"""The whole server against a real Mosquitto, with scripted devices."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.errors import ConfigError
from edgefl.wire.limits import Limits
from edgefl.wire.messages import Progress, Status, Task, UpdateChunk, encode
from server.events import DeviceSeen, Finished, Offline, Rejected, RoundClosed, RoundOpened, Started, Waiting
from server.journal import MOST_REJECTED
from server.service import Service
from tests.conftest import Mosquitto
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    RunningServer,
    ScriptedDevice,
    expected_mean,
    fetch,
    plan_for,
    retained,
    silent,
    trained,
    update_for,
)

MakeDevice = Callable[..., ScriptedDevice]


@pytest.fixture
def device(mosquitto: Mosquitto, federation: str, limits: Limits) -> Iterator[MakeDevice]:
    made: list[ScriptedDevice] = []

    def make(name: str, answer: Any = None, **hello: Any) -> ScriptedDevice:
        made.append(ScriptedDevice(mosquitto.address, federation, name, limits, answer, **hello))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def serve(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def start(**rules: Any) -> RunningServer:
        plan = plan_for(federation, limits, **rules)
        running.append(RunningServer.start(plan, mosquitto.address, tmp_path / "out"))
        return running[-1]

    yield start
    for each in running:
        if each.thread and each.thread.is_alive():
            each.stop()


def test_a_mixed_fleet_trains_to_the_end(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    for name in ("strong-0", "strong-1", "weak-0"):
        device(name)
    server = serve(min_devices=3)
    rounds = [server.wait_for(RoundClosed) for _ in range(2)]
    finished = server.wait_for(Finished)
    server.join()

    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    last = [("strong-0", "strong", 2), ("strong-1", "strong", 2), ("weak-0", "weak", 2)]
    for name, value in expected_mean(WEIGHTS, last).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)
    assert [(closed.round, closed.reports, closed.rejected) for closed in rounds] == [(1, 3, 0), (2, 3, 0)]
    assert all(closed.accuracy == 0.5 and closed.train_loss == 1.5 for closed in rounds)
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert finished.weights_sha256 == digest == rounds[-1].weights_sha256


def nan_update(device: ScriptedDevice, task: Any, opened: Any) -> None:
    arrays = trained(device.name, task)
    arrays["head.weight"] = np.full_like(arrays["head.weight"], np.nan)
    device.send(encode(update_for(device.name, task, opened.model_version, arrays)), task)


def reshaped_update(device: ScriptedDevice, task: Any, opened: Any) -> None:
    arrays = {name: array.ravel() for name, array in trained(device.name, task).items()}
    device.send(encode(update_for(device.name, task, opened.model_version, arrays)), task)


# An update never has masks, and a few bytes of one could ask for a gigabyte.
MASKED = tensors.dump({"mask": np.zeros(1000, np.uint8)}, {"mask": 8000})


def changed(**changes: Any) -> Callable[..., None]:
    return lambda device, task, opened: device.report(task, opened, **changes)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (nan_update, "not-finite"),
        (reshaped_update, "wrong-shape"),
        (changed(tier="weak"), "wrong-tier"),
        (changed(run="another"), "wrong-run"),
        (changed(device="strong-0"), "wrong-device"),
        (changed(model_version="0" * 64), "wrong-model"),
        (changed(tensors=b"no tensors"), "malformed"),
        (changed(tensors=MASKED), "malformed"),
        (lambda device, task, opened: device.send(b"no message", task), "malformed"),
    ],
    ids=["nan", "shape", "tier", "run", "device", "version", "tensors", "mask", "message"],
)
def test_a_bad_update_is_refused_and_recorded_and_the_round_goes_on(
    device: MakeDevice, serve: Any, tmp_path: Path, bad: Any, reason: str
) -> None:
    culprit = device("strong-1", bad)
    device("strong-0")
    server = serve(min_devices=2, rounds=1)
    refused = server.wait_for(Rejected)
    closed = server.wait_for(RoundClosed)
    server.join()

    ack = culprit.acks.get(timeout=PATIENCE_S)
    assert (refused.device, refused.reason) == ("strong-1", reason)
    assert (ack.status, ack.reason) == ("rejected", reason) and ack.text == refused.text
    assert (closed.outcome, closed.reports, closed.rejected) == ("closed", 1, 1)
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    np.testing.assert_array_equal(
        model["body.weight"], expected_mean(WEIGHTS, [("strong-0", "strong", 1)])["body.weight"]
    )
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        assert journal.execute("select device, reason from updates where reason != ''").fetchall() == [
            ("strong-1", reason)
        ]


def test_a_second_copy_is_acknowledged_and_counted_once(device: MakeDevice, serve: Any) -> None:
    eager, slow = device("strong-0", silent), device("strong-1", silent)
    server = serve(rounds=1, min_devices=2)
    opened = eager.wait_open()
    task = eager.tasks.get(timeout=PATIENCE_S)
    eager.report(task, opened)
    eager.report(task, opened)
    statuses = [eager.acks.get(timeout=PATIENCE_S).status for _ in range(2)]
    slow.report(slow.tasks.get(timeout=PATIENCE_S), opened)
    closed = server.wait_for(RoundClosed)
    server.join()
    assert statuses == ["accepted", "accepted"]
    assert (closed.reports, closed.rejected) == (2, 0)


def test_a_copy_of_an_accepted_update_after_the_round_is_still_good_news(
    device: MakeDevice, serve: Any
) -> None:
    first = device("strong-0", silent)
    serve(rounds=2)
    opened, task = first.wait_open(), first.tasks.get(timeout=PATIENCE_S)
    first.report(task, opened)
    assert first.acks.get(timeout=PATIENCE_S).status == "accepted"
    assert first.tasks.get(timeout=PATIENCE_S).round == 2
    first.report(task, opened)
    assert first.acks.get(timeout=PATIENCE_S).status == "accepted"


def test_an_update_for_a_closed_round_is_refused(device: MakeDevice, serve: Any) -> None:
    fast, late = device("strong-0", silent), device("strong-1", silent)
    server = serve(rounds=3, min_devices=2, over_selection=2.0, fraction=0.5)
    opened = fast.wait_open()
    fast.report(fast.tasks.get(timeout=PATIENCE_S), opened)
    server.wait_for(RoundClosed)
    late.report(late.tasks.get(timeout=PATIENCE_S), opened)
    refused = server.wait_for(Rejected)
    assert refused.reason == "closed-round" and late.acks.get(timeout=PATIENCE_S).reason == "closed-round"


def test_an_update_from_a_device_without_a_task_is_refused(device: MakeDevice, serve: Any) -> None:
    stranger = device("strong-9", silent)
    server = serve(rounds=1)
    opened, task = stranger.wait_open(), stranger.tasks.get(timeout=PATIENCE_S)
    for changes in ({"nonce": "0" * 24}, {"round": 8}):
        forged = Task(**{**{name: getattr(task, name) for name in task.__struct_fields__}, **changes})
        stranger.report(forged, opened)
    reasons = {server.wait_for(Rejected).reason for _ in range(2)}
    assert reasons == {"wrong-nonce", "closed-round"}


def test_messages_that_make_no_sense_are_named_and_survived(device: MakeDevice, serve: Any) -> None:
    odd = device("strong-0", silent, samples=2**64 - 1)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    chunk = UpdateChunk(nonce="n", sha256="s", index=0, count=1, size=1, data=b"x")
    odd.say(odd.mine.update(2**70, 0), chunk)
    odd.say(odd.mine.update(-1, 0), chunk)
    odd.session.publish(odd.mine.update(1, 0), b"\x00 no msgpack")
    odd.session.publish(odd.mine.progress, encode(Status(online=True)))
    odd.session.publish(f"{odd.topics.root}/devices/strong-0/updates/one/0", b"x")
    assert {server.wait_for(Rejected).reason for _ in range(5)} == {"malformed"}
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).reports == 1


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


def test_a_device_that_vanishes_does_not_block_the_round(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    device("strong-1", lambda device, task, opened: device.vanish())
    server = serve(rounds=1, min_devices=2, deadline_s=0.5)
    closed = server.wait_for(RoundClosed)
    server.join()
    assert (closed.outcome, closed.reports) == ("closed", 1)


def test_a_round_with_too_few_reports_is_abandoned_and_the_model_unchanged(
    device: MakeDevice, serve: Any, tmp_path: Path
) -> None:
    device("strong-0")
    device("strong-1", silent)
    server = serve(rounds=1, min_devices=2, min_reports=2, deadline_s=0.3)
    closed = server.wait_for(RoundClosed)
    server.join()
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    assert closed.outcome == "abandoned" and "1 of 2 devices" in closed.text
    assert all(np.array_equal(model[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_device_fetches_what_the_announcement_names_and_old_weights_go(
    device: MakeDevice, serve: Any, connect: Any, mosquitto: Mosquitto, federation: str
) -> None:
    strong = device("strong-0", silent)
    server = serve(rounds=2)
    first, task = strong.wait_open(), strong.tasks.get(timeout=PATIENCE_S)
    fetched = fetch(connect(mosquitto.address), federation, first.units["body"])
    strong.report(task, first)
    second = strong.wait_open(round_number=2)
    strong.report(strong.tasks.get(timeout=PATIENCE_S), second)
    server.join()
    np.testing.assert_array_equal(tensors.load(fetched)["body.weight"], WEIGHTS["body.weight"])
    assert first.bundles == second.bundles and first.model_version != second.model_version
    left = retained(connect(mosquitto.address), federation)
    assert not any(first.units["body"].sha256 in topic for topic in left)
    assert sum("/blobs/" in topic for topic in left) == sum(
        ref.count for ref in [*strong.done().units.values(), *second.bundles.values()]
    ) + len(second.bundles)


def test_a_hello_that_asks_for_another_tier_is_answered_with_the_given_one(
    device: MakeDevice, serve: Any
) -> None:
    weak = device("weak-0", silent, tier="strong")
    server = serve(rounds=1)
    assert server.wait_for(Rejected).reason == "wrong-tier"
    assert weak.tasks.get(timeout=PATIENCE_S).tier == "weak"


def test_a_stopped_server_resumes_the_open_round(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    fast, slow = device("strong-0", silent), device("strong-1", silent)
    first = serve(rounds=1, min_devices=2)
    opened = fast.wait_open()
    fast.report(fast.tasks.get(timeout=PATIENCE_S), opened)
    assert fast.acks.get(timeout=PATIENCE_S).status == "accepted"
    task = slow.tasks.get(timeout=PATIENCE_S)
    first.stop()

    second = serve(rounds=1, min_devices=2)
    again = slow.tasks.get(timeout=PATIENCE_S)
    slow.report(again, slow.wait_open())
    closed = second.wait_for(RoundClosed)
    second.join()
    assert second.seen_of(Started)[0].resumed and again == task
    assert closed.reports == 2
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    both = [("strong-0", "strong", 1), ("strong-1", "strong", 1)]
    for name, value in expected_mean(WEIGHTS, both).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


def test_changes_that_are_zero_do_not_count_if_so_asked_also_after_a_restart(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    fast, slow = device("strong-0", silent), device("strong-1", silent)
    plan = replace(plan_for(federation, limits, rounds=1, min_devices=2), count="nonzero")
    first = RunningServer.start(plan, mosquitto.address, tmp_path / "out")
    opened, task = fast.wait_open(), fast.tasks.get(timeout=PATIENCE_S)
    still = {**trained("strong-0", task), "body.weight": WEIGHTS["body.weight"]}
    fast.send(encode(update_for("strong-0", task, opened.model_version, still)), task)
    assert fast.acks.get(timeout=PATIENCE_S).status == "accepted"
    first.stop()

    second = RunningServer.start(plan, mosquitto.address, tmp_path / "out")
    slow.report(slow.tasks.get(timeout=PATIENCE_S), slow.wait_open())
    second.join()
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    both = [("strong-0", "strong", 1), ("strong-1", "strong", 1)]
    alone = expected_mean(WEIGHTS, both[1:])["body.weight"]
    for name, value in (expected_mean(WEIGHTS, both) | {"body.weight": alone}).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_that_ends_with_many_evaluations_pending_resumes_and_tells_of_them_all(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path, lost: bool
) -> None:
    device("strong-0")
    plan, gate = plan_for(federation, limits, rounds=7), threading.Event()
    slow = replace(plan, evaluate=lambda _: (gate.wait(PATIENCE_S), {"accuracy": 0.1})[1])
    first = RunningServer.start(slow, mosquitto.address, tmp_path / "out")
    first.wait_for(RoundOpened, lambda event: event.round == 7)
    first.service.stop()
    gate.set()
    first.join()
    if lost:
        (tmp_path / "out" / "checkpoints" / "round-0001.safetensors").unlink()

    second = RunningServer.start(plan, mosquitto.address, tmp_path / "out")
    second.wait_for(Finished)
    second.join()
    closed = [event for event in first.seen_of(RoundClosed) + second.seen_of(RoundClosed)]
    assert [event.round for event in closed] == list(range(1, 8))
    assert [event.accuracy for event in closed] == [None if lost else 0.5] + [0.5] * 6
    assert lost == ("evaluation failed" in closed[0].text)
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 3


def test_a_finished_run_is_not_trained_again(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    first = serve(rounds=1)
    one = first.wait_for(Finished)
    first.join()
    second = serve(rounds=1)
    two = second.wait_for(Finished)
    second.join()
    assert one == two and not second.seen_of(RoundOpened) and not second.seen_of(RoundClosed)


def test_a_run_is_not_resumed_under_another_configuration(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    plan = plan_for(federation, limits)
    RunningServer.start(plan, mosquitto.address, tmp_path).stop()
    with pytest.raises(ConfigError, match="another configuration"):
        RunningServer.start(replace(plan, digest="e" * 64), mosquitto.address, tmp_path)


def test_a_broker_that_forgets_everything_costs_time_only(
    own_mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    names = ("strong-0", "strong-1")
    devices = [ScriptedDevice(own_mosquitto.address, federation, name, limits, silent) for name in names]
    server = RunningServer.start(
        plan_for(federation, limits, rounds=1, min_devices=2), own_mosquitto.address, tmp_path / "out"
    )
    opened = devices[0].wait_open()
    devices[0].report(devices[0].tasks.get(timeout=PATIENCE_S), opened)
    assert devices[0].acks.get(timeout=PATIENCE_S).status == "accepted"
    before = devices[1].tasks.get(timeout=PATIENCE_S)
    own_mosquitto.kill()
    server.wait_for(Offline)
    own_mosquitto.start()
    after = devices[1].tasks.get(timeout=PATIENCE_S)
    devices[1].report(after, devices[1].wait_open())
    closed = server.wait_for(RoundClosed)
    server.join()
    for device in devices:
        device.stop()
    assert after == before and closed.reports == 2


def test_a_device_that_sends_is_there_whatever_its_will_said(
    device: MakeDevice, serve: Any, tmp_path: Path
) -> None:
    one = device("strong-0", silent)
    server = serve(rounds=1, min_devices=1)
    server.wait_for(RoundOpened)
    one.say(one.mine.status, Status(online=False), retain=True)
    fields = dict.fromkeys(("step", "steps", "peak_bytes", "down_bytes", "up_bytes"), 0)
    progress = Progress(round=1, tier="t" * 99, stage="s" * 99, loss=0.0, step_ms=0.0, **fields)
    one.say(one.mine.progress, progress)
    seen = server.wait_for(DeviceSeen)
    assert (len(seen.tier), len(seen.stage)) == (64, 64)
    server.stop()
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        assert journal.execute("select online from devices").fetchall() == [(1,)]


def test_refusals_are_recorded_in_bounded_number_and_size(
    device: MakeDevice, serve: Any, tmp_path: Path
) -> None:
    odd = device("strong-0", silent)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    for number in range(40):
        chunk = UpdateChunk(nonce=f"{number}" + "n" * 500, sha256="s", index=0, count=1, size=1, data=b"x")
        odd.say(odd.mine.update(1 + number % 20, 0), chunk)
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).rejected == MOST_REJECTED
    server.join()
    assert len(server.seen_of(Rejected)) == MOST_REJECTED
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        assert journal.execute("select max(length(text)) from updates").fetchone()[0] < 300


def test_a_listener_that_fails_does_not_end_the_run(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    def fail(event: Any) -> None:
        raise ValueError(event)

    device("strong-0")
    Service(plan_for(federation, limits), mosquitto.address, tmp_path, emit=fail).run()
    assert (tmp_path / "model.safetensors").exists()


def test_a_listener_that_has_gone_away_ends_the_service_and_the_run_can_be_taken_up(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    def closed(event: Any) -> None:
        if isinstance(event, RoundClosed):
            raise BrokenPipeError

    device("strong-0")
    plan = plan_for(federation, limits)
    Service(plan, mosquitto.address, tmp_path, emit=closed).run()
    assert not (tmp_path / "model.safetensors").exists()
    second = RunningServer.start(plan, mosquitto.address, tmp_path)
    assert second.wait_for(RoundClosed).round == 1
    second.wait_for(Finished)
    second.join()


def test_no_deadline_passes_while_the_broker_is_away(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path, monkeypatch: Any
) -> None:
    service = Service(plan_for(federation, limits), mosquitto.address, tmp_path, emit=lambda _: None)
    advanced: list[Any] = []
    monkeypatch.setattr(service, "_timeout", lambda: 0.0)
    monkeypatch.setattr(service, "_advance", advanced.append)
    service._next()
    assert not advanced
    service._down_since = None
    service._next()
    assert len(advanced) == 1


def test_people_hear_of_devices_and_of_waiting(device: MakeDevice, serve: Any) -> None:
    server = serve(rounds=1, min_devices=2)
    assert (first := server.wait_for(Waiting)).known == 0 and first.needed == 2
    device("strong-0")
    assert server.wait_for(Waiting).known == 1
    device("weak-0")
    assert server.wait_for(RoundOpened).devices == ("strong-0", "weak-0")
    seen = server.wait_for(DeviceSeen, lambda event: event.device == "weak-0")
    assert (seen.tier, seen.stage, seen.loss) == ("weak", "reported", 1.5) and seen.up_bytes > 0
    server.wait_for(Finished)
