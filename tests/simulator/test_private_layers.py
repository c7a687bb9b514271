"""Federations with personal layers: the server's model keeps its private part, tiers, optimizers and warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl.algorithms.baselines.fedavg import fedavg
from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.data.datasets import digits
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.setup.model import federation_model
from edgefl.simulator.carries import CarryStore
from edgefl.simulator.functions import SimulationPlan
from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays
from edgefl_device.round.carry import RoundToBegin, carry_ports, restore_carry
from edgefl_device.store.database import Outgoing
from edgefl_server.events import Event, Warned
from edgefl_server.publish.model import ModelVersion
from tests.device_runtime.store.stores import open_store
from tests.device_runtime.tiny import World, make_bundle
from tests.simulator.small import federation
from tests.support.device_logs import RecordedLog
from tests.support.listeners import CallingListener

MIXED: dict[str, object] = {
    "strong": {"count": 2},
    "weak": {"cut": 1, "count": 1},
    "half": {"kind": "width", "gamma": 0.25, "count": 1},
}


def personal(algorithm: str = "fedper", **changes: dict[str, object]) -> edgefl.Federation:
    own: dict[str, Any] = {
        "federation": {"rounds": 2},
        "model": {"options": {"hidden": [8, 8]}},
        "algorithm": {"name": algorithm},
        "tiers": MIXED,
    }
    return federation(**{key: {**own.get(key, {}), **changes.get(key, {})} for key in {**own, **changes}})


@pytest.mark.parametrize("optimizer", ["none", "fedyogi"])
def test_the_servers_model_keeps_its_private_part(optimizer: str, tmp_path: Path) -> None:
    chosen = personal(optimizer={"name": optimizer})
    initial = federation_model(chosen, digits()).weights

    made = edgefl.simulate(chosen, tmp_path / "out")

    for name, tensor in initial.items():
        is_private = name.startswith("head.")
        assert np.array_equal(made.model[name], tensor.numpy()) == is_private, name
    assert all(row.reports == 4 for row in made.history)
    carries = CarryStore(made.folder / "state.sqlite")
    found = {}
    for client in ("strong-0", "strong-1", "weak-0", "half-0"):
        tier = client.partition("-")[0]
        number = carries.choose(client, RoundToBegin("simulation", f"simulation/fedper/{tier}", 3, 2), 0)
        assert number is not None
        found[client] = carries.read(number)["private.head.dense.bias"]
    carries.close()
    assert len({array.tobytes() for array in found.values()}) == 4


def test_layouts_and_sums_leave_private_tensors_out(tmp_path: Path) -> None:
    plan = SimulationPlan.of(personal("fedrep"), digits())
    model = ModelVersion.of(plan.spec, 0, plan.spec.initial)

    for tier, placement in model.placements.items():
        layout = plan.spec.main.update_layout(tier, placement, plan.spec.trained)
        assert placement.regions.keys() - layout.sent.keys() == {"head.dense.weight", "head.dense.bias"}
        assert layout.sent == layout.averaged
    assert plan.spec.private == {"head.dense.weight", "head.dense.bias"}
    published = model.parts(plan.spec)
    assert "head" in published, "a device without a carry begins with the server's head"


def test_a_device_takes_its_private_layers_to_tiers_where_they_fit(tmp_path: Path) -> None:
    plan = SimulationPlan.of(personal(), digits())
    manifests = {tier: functions.manifest for (tier, _), functions in plan.functions.items()}
    arrays = {port.label: np.full(port.shape, 2.0, port.dtype) for port in carry_ports(manifests["strong"])}
    store = open_store(tmp_path)
    store.finish_job(Outgoing("run", 1, "n1", b"update"), tensors.dump(arrays), "run/fedper/strong")

    def restored(tier: str) -> Arrays:
        job = msgspec.structs.replace(World(make_bundle()).job(), round=2, base=1, tier=tier)
        return restore_carry(store, job, manifests[tier], RecordedLog()).arrays

    assert restored("weak").keys() == restored("strong").keys() == arrays.keys()
    assert restored("weak")["private.head.dense.weight"].min() == 2.0
    assert restored("half") == {}, "its head has fewer inputs"
    assert len(store.carries()) == 1
    store.close()


def test_runs_and_deployments_warn_that_only_devices_can_measure(tmp_path: Path) -> None:
    said: list[Event] = []
    plan = SimulationPlan.of(personal(), digits(), listener=CallingListener(said.append))
    warned = [event.text for event in said if isinstance(event, Warned)]

    expected = "keeps 2 tensors on each device, such as 'head.dense.bias'"
    assert [expected in text for text in warned] == [True] and plan.spec.caveat == warned[0]

    made = edgefl.simulate(personal(tiers={"strong": {"count": 2}}), tmp_path / "out")
    assert any(expected in note for note in edgefl.deploy(made).facts["notes"])


def leaking(objective: Objective, *, batch: int, steps: int) -> Algorithm:
    """FedAvg that declares a tensor private and sends it all the same."""
    return replace(fedavg(objective, batch=batch, steps=steps), private=frozenset({"head.dense.bias"}))


def test_an_algorithm_that_sends_a_private_tensor_is_refused() -> None:
    chosen = federation(algorithm={"name": f"{Path(__file__)}:leaking"})

    with pytest.raises(ConfigError, match=r"sends 'head.dense.bias', which is among its private tensors"):
        SimulationPlan.of(chosen, digits())


def test_tiers_that_keep_different_layers_are_refused() -> None:
    exits: dict[str, object] = {
        "name": "edgefl.models.exits:early_exits",
        "options": {"base": "mlp", "hidden": [8, 8]},
    }
    tiers: dict[str, object] = {
        "first": {"kind": "early_exit", "options": {"exit": 1}},
        "last": {"kind": "early_exit", "options": {"exit": 2}},
    }
    chosen = federation(model=exits, algorithm={"name": "fedper"})
    chosen = chosen.model_copy(update={"tiers": parse({"tiers": tiers}, source="here").tiers})

    with pytest.raises(ConfigError, match=r"on the devices of tier 'first', and tier 'last' sends it"):
        SimulationPlan.of(chosen, digits())
