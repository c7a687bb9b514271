"""A round whose updates ruin the model is undone: nobody ever gets its weights, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import Round, Task, encode
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.collapse import RollbackRule
from edgefl_server.events import Finished, RolledBack, RoundClosed
from edgefl_server.run_spec import RunSpec
from tests.server.fleet import (
    MakeDevice,
    MakePlan,
    ScriptedDevice,
    Serve,
    expected_mean,
    silent,
    trained,
    update_for,
)


def judged(weights: Arrays) -> Mapping[str, float]:
    bad = float(np.abs(weights["head.weight"]).max()) > 100
    return {"accuracy": 0.1 if bad else 0.9, "loss": 9.0 if bad else 0.5}


@pytest.fixture
def plan(plan_of: MakePlan) -> RunSpec:
    return replace(plan_of(rounds=3), evaluate=judged, rollback=RollbackRule(accuracy=0.3))


def poison_in(number: int, seen: dict[int, str]) -> object:
    """Answers honestly, but in that round."""

    def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
        seen[task.round] = opened.model_version
        arrays = trained(device.name, task)
        if task.round == number:
            arrays["head.weight"] = np.full_like(arrays["head.weight"], 1e5)
        device.send(encode(update_for(device.name, task, opened.model_version, arrays)), task)

    return answer


def test_a_collapsed_round_is_undone(device: MakeDevice, serve: Serve, plan: RunSpec, tmp_path: Path) -> None:
    seen: dict[int, str] = {}
    device("strong-0", poison_in(2, seen))

    server = serve(plan)
    server.join()

    (undone,) = server.seen_of(RolledBack)
    closed = server.seen_of(RoundClosed)
    assert (undone.round, undone.accuracy, undone.loss) == (2, 0.1, 9.0)
    assert "round 2 is abandoned and the model unchanged: with its updates accuracy is 0.1" in undone.text
    assert [each.outcome for each in closed] == ["closed", "abandoned", "closed"]
    assert [each.accuracy for each in closed] == [0.9, None, 0.9]
    assert closed[1].text == undone.text and closed[1].weights_sha256 == closed[0].weights_sha256
    assert seen[3] == seen[2] != seen[1]
    assert server.seen_of(Finished)[0].accuracy == 0.9
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    for name, value in expected_mean(model, [("strong-0", "strong", 3)]).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


def test_a_restarted_server_knows_the_best_accuracy(device: MakeDevice, serve: Serve, plan: RunSpec) -> None:
    quiet = device("strong-0", silent)
    first = serve(plan)
    quiet.report(quiet.tasks.get(timeout=50), quiet.wait_open(1))
    first.wait_for(RoundClosed)
    quiet.wait_open(2)
    first.stop()
    quiet.stop()
    device("strong-0", poison_in(2, {}))

    second = serve(plan)
    second.join()

    assert [each.round for each in second.seen_of(RolledBack)] == [2]
    assert [each.outcome for each in second.seen_of(RoundClosed)] == ["abandoned", "closed"]
