"""A service stopped, cut off or started again: the run goes on as if nothing had been."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import Connected
from edgefl_server.coordinator.states import Outage, Tick
from edgefl_server.events import Finished, Offline, Online, RoundClosed, RoundOpened, Started
from edgefl_server.service import Service
from tests.conftest import Mosquitto
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    MakeDevice,
    MakePlan,
    RunningServer,
    ScriptedDevice,
    Serve,
    assert_mean,
    expected_mean,
    plan_for,
    silent,
    trained,
)
from tests.support.listeners import CallingListener


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
    both = [("strong-0", "strong", 1), ("strong-1", "strong", 1)]
    assert_mean(tmp_path / "out", both)


def test_count_nonzero_ignores_zero_changes_also_after_a_restart(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    fast, slow = device("strong-0", silent), device("strong-1", silent)
    plan = replace(plan_of(rounds=1, min_devices=2), count="nonzero")
    first = serve(plan)
    opened, task = fast.wait_open(), fast.tasks.get(timeout=PATIENCE_S)
    still = {**trained("strong-0", task), "body.weight": WEIGHTS["body.weight"]}
    fast.report(task, opened, tensors=tensors.dump(still))
    assert fast.acks.get(timeout=PATIENCE_S).status == "accepted"
    first.stop()

    second = serve(plan)
    slow.report(slow.tasks.get(timeout=PATIENCE_S), slow.wait_open())
    second.join()
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    both = [("strong-0", "strong", 1), ("strong-1", "strong", 1)]
    alone = expected_mean(WEIGHTS, both[1:])["body.weight"]
    for name, value in (expected_mean(WEIGHTS, both) | {"body.weight": alone}).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


@pytest.mark.parametrize("lost", [False, True])
def test_pending_evaluations_are_reported_after_a_restart(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path, lost: bool
) -> None:
    device("strong-0")
    plan, gate = plan_of(rounds=7), threading.Event()
    first = serve(replace(plan, evaluate=lambda _: (gate.wait(PATIENCE_S), {"accuracy": 0.1})[1]))
    first.wait_for(RoundOpened, lambda event: event.round == 7)
    first.service.stop()
    gate.set()
    first.join()
    if lost:
        (tmp_path / "out" / "checkpoints" / "round-0001.safetensors").unlink()

    second = serve(plan)
    second.wait_for(Finished)
    second.join()
    closed = first.seen_of(RoundClosed) + second.seen_of(RoundClosed)
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


def test_a_run_is_not_resumed_under_another_configuration(serve: Serve, plan_of: MakePlan) -> None:
    serve(plan_of()).stop()
    with pytest.raises(ConfigError, match="another configuration"):
        serve(replace(plan_of(), digest="e" * 64))


def test_a_broker_that_forgets_everything_costs_time_only(
    own_mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    names = ("strong-0", "strong-1")
    devices = [ScriptedDevice(own_mosquitto.address, federation, name, limits, silent) for name in names]
    plan = plan_for(federation, limits, rounds=1, min_devices=2)
    server = RunningServer.start(plan, own_mosquitto.address, tmp_path / "out")
    opened = devices[0].wait_open()
    devices[0].report(devices[0].tasks.get(timeout=PATIENCE_S), opened)
    assert devices[0].acks.get(timeout=PATIENCE_S).status == "accepted"
    before = devices[1].tasks.get(timeout=PATIENCE_S)
    own_mosquitto.kill()
    server.wait_for(Offline)
    own_mosquitto.start()
    assert server.wait_for(Online).broker == str(own_mosquitto.address)
    after = devices[1].tasks.get(timeout=PATIENCE_S)
    devices[1].report(after, devices[1].wait_open())
    closed = server.wait_for(RoundClosed)
    server.join()
    for device in devices:
        device.stop()
    assert after == before and closed.reports == 2


def test_a_closed_listener_ends_the_service_and_the_run_resumes(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    def closed(event: Any) -> None:
        if isinstance(event, RoundClosed):
            raise BrokenPipeError

    device("strong-0")
    serve(plan_of(), hear=closed).join()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    second = serve()
    assert second.wait_for(RoundClosed).round == 1
    second.wait_for(Finished)
    second.join()


def test_no_deadline_passes_while_the_broker_is_away(
    mosquitto: Mosquitto, plan_of: MakePlan, tmp_path: Path, monkeypatch: Any
) -> None:
    service = Service(plan_of(), mosquitto.address, tmp_path, listener=CallingListener(lambda _: None))
    advanced: list[Any] = []
    monkeypatch.setattr(service, "_run_timers", lambda: 0.0)
    monkeypatch.setattr(service, "dispatch", advanced.append)
    service.step()
    assert not advanced
    service.handle(Connected(resumed=False))
    service.step()
    assert [type(event) for event in advanced] == [Outage, Tick]
