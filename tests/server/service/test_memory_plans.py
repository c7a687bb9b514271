"""Plans of memory that devices do not keep are raised: tiers ask for more, and people are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import Round, Task
from server.coordinator.roster import TierRule
from server.dashboard.known.fleet import Fleet, Tier
from server.dashboard.known.source import Folder
from server.events import REPORTED, DeviceSeen, Rejected, Warned
from server.memory_plans import MemoryPlans, read_raised
from tests.conftest import Mosquitto
from tests.server.fleet import RunningServer, ScriptedDevice, plan_for, update_for
from tests.server.service.served import MakeDevice

MIB = 1 << 20
PLANNED = {"strong": 10 * MIB}


def seen(device: str, mib: int, stage: str = REPORTED) -> DeviceSeen:
    return DeviceSeen(
        device=device, tier="strong", round=1, stage=stage, idle_bytes=MIB, peak_bytes=(1 + mib) * MIB
    )


def test_a_plan_is_raised_to_the_median_of_its_devices(tmp_path: Path) -> None:
    plans = MemoryPlans(tmp_path, PLANNED)

    assert plans.report(seen("a", 9)) is None
    assert plans.report(seen("liar", 900)) is None
    raised = plans.report(seen("b", 14))

    assert raised is not None and "14.0 MiB on devices, planned 10.0 MiB" in raised.text
    assert plans.report(seen("b", 14)) is None, "it was told"
    assert read_raised(tmp_path) == {"strong": 14 * MIB}


def test_one_device_raises_a_plan_to_twice_of_it_at_most(tmp_path: Path) -> None:
    plans = MemoryPlans(tmp_path, PLANNED)

    assert plans.report(seen("liar", 900)) is not None

    assert read_raised(tmp_path) == {"strong": 20 * MIB}


def test_what_is_no_report_of_a_round_raises_nothing(tmp_path: Path) -> None:
    plans = MemoryPlans(tmp_path, PLANNED | {"unknown": 0})

    others = [seen("a", 19, "train"), msgspec.structs.replace(seen("a", 19), tier="unknown")]

    assert [plans.report(each) for each in others] == [None, None]


def test_a_file_of_plans_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "memory_plans.json").write_text('{"strong": "much"}')

    assert read_raised(tmp_path) == {} and MemoryPlans(tmp_path, PLANNED).report(seen("a", 12)) is not None


def test_a_raised_plan_decides_who_gets_the_tier_and_outlives_the_server(
    device: MakeDevice, mosquitto: Mosquitto, federation: str, limits: Any, tmp_path: Path
) -> None:
    def hungry(scripted: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round > 1:
            return
        profile = update_for("", task, "", {}).profile
        peak = msgspec.structs.replace(profile, idle_bytes=MIB, peak_bytes=16 * MIB)
        scripted.report(task, opened, profile=peak)

    rules = (TierRule("strong", (), 10 * MIB), TierRule("weak", ("weak-*",)))
    plan = plan_for(federation, limits, rounds=2, tiers=rules)
    [graph] = plan.tiers["strong"].bundle.manifest.graphs
    manifest = msgspec.structs.replace(
        plan.tiers["strong"].bundle.manifest, graphs=(msgspec.structs.replace(graph, planned_bytes=10 * MIB),)
    )
    bundle = dataclasses.replace(plan.tiers["strong"].bundle, manifest=manifest)
    tiers = dict(plan.tiers) | {"strong": dataclasses.replace(plan.tiers["strong"], bundle=bundle)}
    plan = dataclasses.replace(plan, tiers=tiers)
    server = RunningServer.start(plan, mosquitto.address, tmp_path / "out")
    device("phone", hungry, memory_bytes=64 * MIB)
    assert "15.0 MiB on devices" in server.wait_for(Warned).text
    device("small", memory_bytes=12 * MIB, tier="strong")
    assert server.wait_for(Rejected, lambda event: event.device == "small").reason == "wrong-tier"
    server.stop()

    second = RunningServer.start(plan, mosquitto.address, tmp_path / "out")
    assert second.wait_for(Rejected, lambda event: event.device == "small").reason == "wrong-tier"
    second.stop()
    fleet = Fleet(tiers={"strong": Tier(name="strong", planned_bytes=10 * MIB)})
    Folder(tmp_path / "out")._look(fleet)
    assert fleet.tiers["strong"].planned_bytes == 15 * MIB
