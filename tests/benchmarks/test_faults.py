"""Runs under faults end with the weights of the run that nobody disturbed, and fuzzed messages change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import FaultCampaign
from benchmarks.fuzz import measure
from edgefl.lab.faults.schedule import Fault, Schedule

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINKS = Schedule(
    seed=1,
    faults=(
        Fault(kind="duplicate", amount=0.5, seconds=5),
        Fault(kind="reorder", amount=0.05, seconds=5),
        Fault(kind="reset", round=2, after_s=0.1),
        Fault(kind="half_open", target="all-1", round=2, after_s=0.3),
        Fault(kind="stall", target="server", round=3, seconds=0.5),
        Fault(kind="bandwidth", target="all-2", round=3, amount=50_000),
    ),
)
PROCESSES = Schedule(
    seed=2,
    faults=(
        Fault(kind="kill", target="server", after_s=0.3),
        Fault(kind="kill", target="broker", round=2, after_s=0.1),
        Fault(kind="stop", target="all-0", round=2, after_s=0.1, seconds=1.0),
        Fault(kind="kill", target="all-1", round=2, after_s=0.2),
        Fault(kind="clock", target="server", round=3, after_s=0.05, amount=86_400.0),
        Fault(kind="clock", target="all-2", round=3, amount=-3_600.0),
    ),
)
FULL_DISKS = Schedule(
    seed=3,
    faults=(
        Fault(kind="disk_full", target="all-0", seconds=2.0),
        Fault(kind="disk_full", target="server", round=2, seconds=2.0),
    ),
)


@pytest.fixture(scope="module")
def campaign() -> Iterator[FaultCampaign]:
    with FaultCampaign(broker="auto") as made:
        yield made


@pytest.mark.parametrize("schedule", [LINKS, PROCESSES, FULL_DISKS], ids=["links", "processes", "full disks"])
def test_a_disturbed_run_ends_with_the_same_weights(campaign: FaultCampaign, schedule: Schedule) -> None:
    row = campaign.measure(schedule, print)

    assert (row.why, row.same, row.rounds) == ("", True, 3), row
    assert row.faults == schedule.faults
    assert row.happened == len(schedule.faults)
    assert row.refusals == (), "no fault ends a run, and who cannot write waits for room"


@pytest.mark.parametrize("target", ["server", "agent"])
def test_fuzzed_messages_change_nothing(target: str, tmp_path: Path) -> None:
    row = measure(target, messages=2_000, seed=3, broker="auto", folder=tmp_path, say=print)

    assert row.why == "" and row.ok, row
    assert (row.messages, row.crashes, row.accepted) == (2_000, 0, row.expected)
