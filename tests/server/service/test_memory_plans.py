"""Plans of memory that devices do not keep are raised: tiers ask for more, and people are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.mqtt.messages import Round, Task
from edgefl_server.coordinator.roster import TierRule, tier_of
from edgefl_server.dashboard.state.fleet import Fleet, TierPlan
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.events import REPORTED, DeviceSeen, Rejected, Warned
from edgefl_server.memory_plans import MemoryPlans, read_raised
from tests.server.fleet import PROFILE, MakeDevice, MakePlan, ScriptedDevice, Serve, with_manifest

MIB = 1 << 20
PLANNED = {"strong": 10 * MIB}


def seen(device: str, mib: int, stage: str = REPORTED) -> DeviceSeen:
    return DeviceSeen(
        device=device, tier="strong", round=1, stage=stage, idle_bytes=MIB, peak_bytes=(1 + mib) * MIB
    )


def reported(plans: MemoryPlans, *peaks: int) -> list[Warned | None]:
    """Return what the reports of devices a, b, ... give, whose rounds take ``peaks`` MiB."""
    return [plans.report(seen(name, mib)) for name, mib in zip("abcdefg", peaks, strict=False)]


def test_a_plan_is_raised_to_the_median_of_its_devices_and_lowered_again(tmp_path: Path) -> None:
    plans = MemoryPlans(tmp_path, PLANNED)

    *before, raised = reported(plans, 9, 900, 14)

    assert before == [None, None]
    assert raised is not None and "14.0 MiB on devices, planned 10.0 MiB" in raised.text
    assert plans.report(seen("c", 14)) is None, "it was told"
    assert read_raised(tmp_path) == {"strong": 14 * MIB}
    assert not any(reported(plans, 9, 900, 14, 8, 8)) and read_raised(tmp_path) == {"strong": 10 * MIB}


@pytest.mark.parametrize(("devices", "raised"), [(2, {}), (3, {"strong": 20 * MIB})])
def test_devices_raise_a_plan_at_most_twofold(devices: int, raised: dict[str, int], tmp_path: Path) -> None:
    reported(MemoryPlans(tmp_path, PLANNED), *[900] * devices)

    assert read_raised(tmp_path) == raised


def test_a_raised_plan_does_not_change_the_order_of_tiers() -> None:
    tiers = [TierRule("strong", (), 100 * MIB), TierRule("weak", (), 60 * MIB, raised_bytes=110 * MIB)]

    assert [tier_of(tiers, "x", mib * MIB) for mib in (150, 90)] == ["strong", ""]
    assert tier_of(tiers, "x", 60 * MIB, known="weak") == "weak"


def test_what_is_no_report_of_a_round_raises_nothing(tmp_path: Path) -> None:
    plans = MemoryPlans(tmp_path, PLANNED | {"unknown": 0})

    others = [seen("a", 19, "train"), msgspec.structs.replace(seen("a", 19), tier="unknown")]

    assert [plans.report(each) for each in others * 3] == [None] * 6


def test_a_file_of_plans_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "memory_plans.json").write_text('{"strong": "much"}')

    assert read_raised(tmp_path) == {} and reported(MemoryPlans(tmp_path, PLANNED), 12, 12, 12)[-1]


def test_a_raised_plan_decides_who_gets_the_tier_and_outlives_the_server(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path
) -> None:
    def hungry(scripted: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round == 1:
            peak = msgspec.structs.replace(PROFILE, idle_bytes=MIB, peak_bytes=16 * MIB)
            scripted.report(task, opened, profile=peak)

    rules = (TierRule("strong", (), 10 * MIB), TierRule("weak", ("weak-*",)))
    plan = plan_of(rounds=2, tiers=rules, min_devices=3)
    [graph] = plan.tiers["strong"].bundle.manifest.graphs
    graphs = (msgspec.structs.replace(graph, planned_bytes=10 * MIB),)
    tiers = {**plan.tiers, "strong": with_manifest(plan.tiers["strong"], graphs=graphs)}
    plan = dataclasses.replace(plan, tiers=tiers)
    server = serve(plan)
    for name in ("phone", "board", "tablet"):
        device(name, hungry, memory_bytes=64 * MIB)
    assert "15.0 MiB on devices" in server.wait_for(Warned).text
    device("small", memory_bytes=12 * MIB, tier="strong")
    assert server.wait_for(Rejected, lambda event: event.device == "small").reason == "wrong-tier"
    server.stop()

    second = serve(plan)
    assert second.wait_for(Rejected, lambda event: event.device == "small").reason == "wrong-tier"
    second.stop()
    fleet = Fleet(tiers={"strong": TierPlan(name="strong", planned_bytes=10 * MIB)})
    FolderSource(tmp_path / "out").load_details(fleet)
    assert fleet.tiers["strong"].planned_bytes == 15 * MIB
