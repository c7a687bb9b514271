"""What a round tells of its uplink: its bytes, and what they would have been with float32 tensors in the messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import Round, Task
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import SIGNS, CodeEncoding, Form, Section
from edgefl_server.events import RoundClosed
from tests.server.fleet import WEIGHTS, MakeDevice, MakePlan, ScriptedDevice, Serve, names_of, trained

NAMES = tuple(sorted(names_of("weak")))
SIGNED = Form(
    "scaled_sign",
    1,
    (Section(NAMES, CodeEncoding(1, SIGNS), {name: number for number, name in enumerate(NAMES)}),),
    change=True,
)


def signs() -> Arrays:
    arrays = SIGNED.arrays({name: WEIGHTS[name].size for name in NAMES})
    return {name: np.ones(length, dtype) for name, (dtype, length) in arrays.items()}


def send_signs(device: ScriptedDevice, task: Task, opened: Round) -> None:
    device.report(task, opened, tensors=tensors.dump(signs()), codec="scaled_sign", codec_version=1)


def test_dense_updates_take_as_much_as_float32(device: MakeDevice, serve: Any) -> None:
    for name in ("strong-0", "weak-0"):
        device(name)

    closed = serve(min_devices=2, rounds=1).wait_for(RoundClosed)

    assert closed.up_float32_bytes == closed.up_bytes > 0


def test_encoded_updates_have_a_float32_size(device: MakeDevice, serve: Serve, plan_of: MakePlan) -> None:
    weak, plan = device("weak-0", send_signs), plan_of(rounds=1)
    tiers = {**plan.tiers, "weak": replace(plan.tiers["weak"], form=SIGNED)}

    closed = serve(replace(plan, tiers=tiers)).wait_for(RoundClosed)

    dense = tensors.dump(trained(weak.name, Task(run="", round=1, tier="weak", seed=0, nonce="")))
    assert (closed.reports, closed.rejected) == (1, 0)
    assert closed.up_float32_bytes - closed.up_bytes == len(dense) - len(tensors.dump(signs()))
