"""Evaluation rounds of a real service over a real broker, with scripted devices that copy, lie and decline."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import ConfigError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, Decline, Round, Task
from edgefl_server.coordinator.states import EvaluationSchedule
from edgefl_server.events import (
    REPORTED,
    DeviceEvaluation,
    DeviceSeen,
    Finished,
    RoundClosed,
    RoundOpened,
    Started,
    UpdateAccepted,
)
from edgefl_server.shards.messages import worker_of
from edgefl_server.shards.pool import WorkerOptions
from tests.conftest import Mosquitto
from tests.server.evaluations import honest, report_sums, take_part, total_of, with_evaluation
from tests.server.fleet import (
    PATIENCE_S,
    UNITS,
    MakeDevice,
    MakePlan,
    RunningServer,
    ScriptedDevice,
    Serve,
    plan_for,
    silent,
)
from tests.server.shards.fleets import KnownWorkers


def evaluation_of(closed: RoundClosed) -> DeviceEvaluation:
    assert closed.evaluation is not None
    return closed.evaluation


def test_exact_sums_with_copies_lies_and_a_device_that_leaves(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    def copies(own: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round % 2:
            own.report(task, opened)
        else:
            data = report_sums(own, task, opened, honest(own.name))
            own.send(data, task)

    def lies(own: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round % 2:
            own.report(task, opened)
        else:
            report_sums(own, task, opened, {"loss_sum": 0, "correct": 10**9, "count": 10**9})

    def declines(own: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round % 2:
            own.report(task, opened)
        else:
            own.say(own.mine.declines, Decline(round=task.round, nonce=task.nonce, reason="wrong-data"))

    device("strong-0", take_part), device("strong-1", copies)
    device("strong-2", lies), device("strong-3", declines)
    plan = plan_of(rounds=2, min_devices=4, min_reports=2, evaluation=EvaluationSchedule(every=1))
    running = serve(with_evaluation(plan))
    closed = {event.round: event for event in (running.wait_for(RoundClosed) for _ in range(4))}
    finished = running.wait_for(Finished)
    running.join()

    assert [closed[number].evaluation is None for number in (1, 2, 3, 4)] == [True, False, True, False]
    assert [closed[number].accuracy for number in (1, 2, 3, 4)] == [0.5, None, 0.5, None]
    found = evaluation_of(closed[2])
    assert found.sums == total_of("strong-0", "strong-1")
    assert found.devices is not None and found.devices.devices == 2
    assert (found.devices.metrics["accuracy"], found.trained_rounds) == (3 / 16, 1)
    assert closed[1].weights_sha256 == closed[2].weights_sha256 != closed[3].weights_sha256
    assert (finished.rounds, finished.accuracy) == (4, 0.5)
    assert running.seen_of(Started)[0].rounds == 4


def test_a_server_that_is_stopped_in_an_evaluation_resumes_it(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    fast, slow = device("strong-0", silent), device("strong-1", silent)

    def train() -> None:
        opened = fast.wait_open(1)
        for each in (fast, slow):
            each.report(each.tasks.get(timeout=PATIENCE_S), opened)
            assert each.acks.get(timeout=PATIENCE_S).status == "accepted"

    plan = with_evaluation(plan_of(rounds=1, min_devices=2, evaluation=EvaluationSchedule(every=1)))
    first = serve(plan)
    train()
    opened = fast.wait_open(2)
    task = fast.tasks.get(timeout=PATIENCE_S)
    sent = report_sums(fast, task, opened, honest("strong-0"))
    accepted: Ack = fast.acks.get(timeout=PATIENCE_S)
    assert accepted.status == "accepted"
    waiting = slow.tasks.get(timeout=PATIENCE_S)
    first.stop()

    second = serve(plan)
    again = slow.tasks.get(timeout=PATIENCE_S)
    assert again == waiting
    fast.send(sent, task)  # a copy: the device has not heard that it was accepted
    assert fast.acks.get(timeout=PATIENCE_S).status == "accepted"
    report_sums(slow, again, slow.wait_open(2), honest("strong-1"))
    found = evaluation_of(second.wait_for(RoundClosed, lambda event: event.round == 2))
    second.join()

    assert found.sums == total_of("strong-0", "strong-1")


WORKED = tuple(f"strong-{number}" for number in range(5)) + tuple(f"weak-{number}" for number in range(5, 8))


@pytest.mark.parametrize("killed", [False, True])
def test_workers_report_what_a_server_alone_reports(
    killed: bool, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    go_on, found = threading.Event(), dict[int, DeviceEvaluation]()
    known: Any = KnownWorkers()

    def answer(own: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round == 2 and own.name == WORKED[-1]:
            assert go_on.wait(PATIENCE_S)
        take_part(own, task, opened)

    for workers in (0, 2):
        with ExitStack() as until:
            name = f"{federation}-{workers}"
            for each in WORKED:
                until.callback(ScriptedDevice(mosquitto.address, name, each, limits, answer).stop)
            plan = plan_for(
                name, limits, rounds=1, min_devices=len(WORKED), evaluation=EvaluationSchedule(every=1)
            )
            running = RunningServer.start(
                with_evaluation(plan),
                mosquitto.address,
                tmp_path / name,
                workers=WorkerOptions(workers, known),
            )
            until.callback(running.service.stop)
            if workers and killed:
                first = running.wait_for(UpdateAccepted, lambda event: event.round == 2).device
                os.kill(known.pid(worker_of(first, workers)), signal.SIGKILL)
            go_on.set()
            found[workers] = evaluation_of(running.wait_for(RoundClosed, lambda event: event.round == 2))
            running.join()
            go_on.clear()

    assert found[2] == found[0]
    assert found[2].sums == total_of(*WORKED)
    assert {tier: group.devices for tier, group in found[2].tiers.items()} == {"strong": 5, "weak": 3}


def test_an_evaluation_draws_its_devices_and_publishes_its_own_bundle(
    device: MakeDevice, serve: Serve, plan_of: MakePlan
) -> None:
    for number in range(4):
        device(f"strong-{number}", take_part)
    watcher = device("weak-9", take_part)
    plan = plan_of(rounds=1, min_devices=5, evaluation=EvaluationSchedule(every=1, devices=2))
    running = serve(with_evaluation(plan))
    training, evaluating = watcher.wait_open(1), watcher.wait_open(2)
    opened = running.wait_for(RoundOpened, lambda event: event.round == 2)
    running.join()
    seen = [event for event in running.seen_of(DeviceSeen) if event.stage != REPORTED]
    assert {(event.round, event.stage) for event in seen} == {(1, "train"), (2, "evaluate")}
    assert opened.evaluates
    assert (opened.goal, len(opened.devices)) == (2, 2)
    assert training.offers["onnx"].bundles["strong"] != evaluating.offers["onnx"].bundles["strong"]
    assert training.units.keys() == evaluating.units.keys() == set(UNITS)


def test_candidates_of_a_rollout_have_no_part_in_an_evaluation(
    device: MakeDevice, serve: Serve, plan_of: MakePlan
) -> None:
    device("strong-0", take_part)
    plan = with_evaluation(plan_of(rounds=1, evaluation=EvaluationSchedule(every=1)))
    running = serve(replace(plan, tiers={**plan.tiers, "strong@candidate": plan.tiers["strong"]}))
    found = evaluation_of(running.wait_for(RoundClosed, lambda event: event.round == 2))
    running.join()
    assert found.tiers.keys() == {"strong"}


@pytest.mark.parametrize("rules", [{"buffer": 1, "max_staleness": 1}, {}])
def test_only_a_finished_synchronous_run_is_evaluated_again(
    serve: Serve, plan_of: MakePlan, rules: dict[str, int]
) -> None:
    with pytest.raises(ConfigError):
        serve(with_evaluation(plan_of(rounds=1, **rules)), evaluate=True)
