"""What the service takes devices to have begun with, where weights are rounded on their way down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.blobs import decompress
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.messages import Round, Task
from edgefl.wire.tensors import Arrays
from edgefl_server.events import RoundClosed
from edgefl_server.run_spec import AggregateSpec, DownlinkSpec, RunSpec
from edgefl_server.service import Service
from tests.server.fleet import UNITS, WEIGHTS, MakeDevice, MakePlan, ScriptedDevice, Serve, names_of, plan_for
from tests.support.listeners import CallingListener

LIMIT = 0.5
HALF = {name: array.astype(np.float16).astype(np.float32) for name, array in WEIGHTS.items()}
SOUGHT = {name: np.full(array.shape, 0.25, np.float32) for name, array in WEIGHTS.items()}
Trained = Callable[[Arrays], Arrays]


@pytest.fixture
def one_round(device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path) -> Callable[..., Arrays]:
    """Function that returns the model after one device sent what it ``trained`` from the weights in float16."""

    def run(trained: Trained, **changes: Any) -> Arrays:
        def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
            sent = trained({name: HALF[name] for name in names_of(task.tier)})
            device.report(task, opened, tensors=tensors.dump(sent))

        device("strong-0", answer)
        rounded = {"trained": frozenset(WEIGHTS), "downlink": DownlinkSpec("float16"), **changes}
        server = serve(replace(plan_of(rounds=1), **rounded))
        assert server.wait_for(RoundClosed).reports == 1
        server.join()
        return tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())

    return run


def test_an_update_is_shortened_towards_the_weights_that_were_given(one_round: Any) -> None:
    clipped = AggregateSpec(clip_norm=LIMIT)
    model = one_round(lambda given: {n: a + SOUGHT[n] for n, a in given.items()}, aggregate=clipped)

    norm = np.sqrt(sum(float((change.astype(np.float64) ** 2).sum()) for change in SOUGHT.values()))
    assert norm > 2 * LIMIT
    for name in names_of("strong"):
        np.testing.assert_allclose(model[name], HALF[name] + SOUGHT[name] * (LIMIT / norm), atol=1e-6)


def test_an_entry_that_comes_back_as_given_is_unchanged(one_round: Any) -> None:
    model = one_round(lambda given: given | {"head.weight": given["head.weight"] + 1}, count="nonzero")

    assert any(not np.array_equal(HALF[name], WEIGHTS[name]) for name in names_of("strong"))
    for name in names_of("strong"):
        expected = HALF[name] + 1 if name == "head.weight" else WEIGHTS[name]
        np.testing.assert_allclose(model[name], expected, atol=1e-6 if name == "head.weight" else 0)


@pytest.mark.parametrize("same_weights", [False, True])
def test_a_second_run_in_a_folder_publishes_its_own_weights(
    federation: str, limits: Limits, tmp_path: Path, same_weights: bool
) -> None:
    plan = replace(plan_for(federation, limits), trained=frozenset(WEIGHTS), downlink=DownlinkSpec("int8"))
    other = {name: array + np.float32(not same_weights) for name, array in WEIGHTS.items()}
    for initial, database in ((WEIGHTS, "one"), (other, "two")):
        started = start(replace(plan, initial=initial), tmp_path, database)
    again = start(replace(plan, initial=other), tmp_path, "two")

    for service in (started, again):
        told = service.driver.announcements
        found: Arrays = {}
        for ref in told.published:
            data = decompress(ref, told.publisher.encoded(ref.sha256), 1 << 20)
            found |= tensors.load(data)
        assert len(told.published) == len(UNITS)
        assert all(found[name].tobytes() == other[name].tobytes() for name in other)
    assert again.is_resumed


def start(plan: RunSpec, out: Path, database: str) -> Any:
    where = f"sqlite:///{out / database}.sqlite"
    return Service(
        plan, Address("127.0.0.1", 1), out, listener=CallingListener(lambda _: None), database=where
    )
