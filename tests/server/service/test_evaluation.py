"""Evaluation rounds of a real service over a real broker, with scripted devices that copy, lie and decline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.bundle.graphs import Port
from edgefl.wire.mqtt.messages import Ack, Decline, Round, Task, encode
from edgefl_server.aggregate.integer_sums import SCALE
from edgefl_server.coordinator.states import EvaluationSchedule
from edgefl_server.events import (
    REPORTED,
    DeviceEvaluation,
    DeviceSeen,
    Finished,
    RoundClosed,
    RoundOpened,
    Started,
)
from edgefl_server.run_spec import ExchangeSpec, RunSpec, TierSpec
from tests.device_runtime import tiny
from tests.server.fleet import (
    PATIENCE_S,
    UNITS,
    MakeDevice,
    MakePlan,
    ScriptedDevice,
    Serve,
    bundle,
    placed,
    progress,
    silent,
    update_for,
)

Sums = dict[str, int]


def with_evaluation(plan: RunSpec) -> RunSpec:
    """Return the plan with an exchange in which the strong tier reports loss_sum, correct and count."""
    made = bundle("strong")
    ports = tuple(
        Port(name=f"update.{name}", role="update", dtype="int64", shape=())
        for name in ("loss_sum", "correct", "count")
    )
    batch = Port(name="batch.0.y", role="batch", dtype="int64", shape=(4,))
    data = b"evaluates"
    graph = tiny.graph_of("g", data, (batch,), ports)
    graph = msgspec.structs.replace(graph, metrics=("accuracy", "loss"))
    manifest = msgspec.structs.replace(made.manifest, graphs=(graph,))
    tier = TierSpec(
        replace(made, manifest=manifest, blobs={graph.blob.sha256: data}), placed("strong"), sends=()
    )
    weak = TierSpec(
        replace(made, manifest=manifest, blobs={graph.blob.sha256: data}), placed("weak"), sends=()
    )
    return replace(plan, evaluation=ExchangeSpec({"strong": tier, "weak": weak}, {}))


def report_sums(device: ScriptedDevice, task: Task, opened: Round, sums: Sums, **changes: Any) -> bytes:
    """Send the report of an evaluation, and return its bytes."""
    arrays = {name: np.array(round(value * SCALE), np.int64) for name, value in sums.items()}
    data = encode(
        update_for(device.name, task, opened.model_version, {}, tensors=tensors.dump(arrays), **changes)
    )
    device.send(data, task)
    return data


def honest(name: str) -> Sums:
    number = int(name.rpartition("-")[2])
    return {"loss_sum": 1.5 * (number + 1), "correct": number + 1, "count": 8}  # type: ignore[dict-item]


def take_part(device: ScriptedDevice, task: Task, opened: Round) -> None:
    """Train in odd rounds, evaluate in even ones."""
    device.say(device.mine.progress, progress("train", round=task.round))
    if task.round % 2:
        device.report(task, opened)
    else:
        report_sums(device, task, opened, honest(device.name))


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
    wanted = [honest(name) for name in ("strong-0", "strong-1")]
    assert found.sums == {name: sum(round(each[name] * SCALE) for each in wanted) for name in wanted[0]}
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

    both = [honest("strong-0"), honest("strong-1")]
    assert found.sums == {name: sum(round(each[name] * SCALE) for each in both) for name in both[0]}


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
