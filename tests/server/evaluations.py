"""Plans with evaluation rounds, and the reports of scripted devices in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from edgefl.wire import tensors
from edgefl.wire.bundle.graphs import Port
from edgefl.wire.mqtt.messages import Round, Task, encode
from edgefl_server.aggregate.integer_sums import SCALE
from edgefl_server.run_spec import ExchangeSpec, RunSpec, TierSpec
from tests.device_runtime import tiny
from tests.server.fleet import ScriptedDevice, bundle, placed, progress, update_for

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


def total_of(*names: str) -> Sums:
    """Return the exact sums of the honest reports of these devices."""
    reports = [honest(name) for name in names]
    return {name: sum(round(each[name] * SCALE) for each in reports) for name in reports[0]}
