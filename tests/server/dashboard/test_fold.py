"""What is known of a fleet, from what a server told of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.dashboard import FEDERATION, RUN, SyntheticRun
from edgefl_server import events
from edgefl_server.dashboard.state import fleet as fleets
from edgefl_server.dashboard.state import fold
from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.dashboard.views import summary
from edgefl_server.dashboard.views.summary import DeviceFilter, FleetSnapshot, histogram
from edgefl_server.events import (
    DeviceJoined,
    DeviceSeen,
    ParticipationDeclined,
    Rejected,
    RoundEnded,
    RoundOpened,
    UpdateAccepted,
)
from edgefl_server.storage.feed import FeedWriter
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import UpdateFiles

DEVICES = ("strong-0", "strong-1", "weak-0", "weak-1")


def started(run: str = "r") -> events.Started:
    return events.Started(
        federation="f", run=run, rounds=3, next_round=1, resumed=False, model_version="v", device="cpu"
    )


def told(*more: events.Event) -> Fleet:
    """A round of four devices that is open since second 10, and what happened then, a second each."""
    fleet = Fleet()
    beginning = [started(), *(DeviceJoined(device=name, tier=name[:-2]) for name in DEVICES)]
    opened = RoundOpened(round=1, goal=4, devices=DEVICES, deadline=60.0)
    for event in beginning:
        fold.apply(fleet, 1.0, event)
    for at, event in enumerate((opened, *more)):
        fold.apply(fleet, 10.0 + at, event)
    return fleet


def report(device: str, number: int = 1) -> list[events.Event]:
    tier = device[:-2]
    accepted = UpdateAccepted(device=device, tier=tier, round=number, nonce="", sha256="", weight=5)
    seen = DeviceSeen(
        device=device, tier=tier, round=number, stage="reported", loss=0.5, step_ms=20.0,
        peak_bytes=150, idle_bytes=100, down_bytes=7, up_bytes=3,
    )  # fmt: skip
    return [accepted, seen]


ENDED = RoundEnded(
    round=1,
    outcome="closed",
    reports=2,
    missing={"weak-0": "it declined (policy)", "weak-1": "it did not report in time"},
    seconds=5.0,
)
DECLINED = ParticipationDeclined(device="weak-0", round=1, reason="policy", text="not at night")


def test_a_round_counts_what_became_of_each_of_its_devices() -> None:
    late = Rejected(device="weak-1", round=1, reason="closed-round", text="it is over")
    fleet = told(*report("strong-0"), *report("strong-1"), DECLINED, ENDED, late)

    row = FleetSnapshot(fleet).round(1)

    assert (row.selected, row.arrived, row.declined, row.missing, row.late) == (4, 2, 1, 1, 1)
    assert row.reasons == {"policy": 1, "it did not report in time": 1}
    assert row.tiers["strong"].seconds == 2.0 and row.tiers["strong"].used_bytes == 50
    assert (row.tiers["strong"].up_bytes, row.tiers["weak"].arrived) == (6, 0)
    assert summary.staleness(fleet) == {0: 2, 1: 1}, "the late update was one version behind"


def test_a_device_at_an_earlier_version_is_at_work_and_not_missed() -> None:
    """Where versions wait for nobody: two are at work while the first one ends, of whom one is late for good."""
    ends = RoundEnded(round=1, outcome="closed", reports=2, missing={}, seconds=5.0)
    opens = RoundOpened(round=2, goal=2, devices=("strong-0", "weak-0", "weak-1"), deadline=90.0)
    fleet = told(*report("strong-0"), *report("strong-1"), ends, opens)

    states = {name: summary.state_of(fleet, fleet.devices[name]) for name in DEVICES}
    assert states == {"strong-0": "working", "strong-1": "idle", "weak-0": "working", "weak-1": "working"}
    assert list(fleet.rounds[2].parts) == ["strong-0"]

    late = {"weak-0": "too many versions came since it began"}
    for event in (
        *report("weak-1"),
        RoundEnded(round=2, outcome="closed", reports=1, missing=late, seconds=1.0),
    ):
        fold.apply(fleet, 30.0, event)

    first, second = FleetSnapshot(fleet).round(1), FleetSnapshot(fleet).round(2)
    assert (first.selected, first.arrived, first.missing) == (4, 3, 1)
    assert (second.selected, second.arrived, second.missing) == (1, 1, 0)
    assert [fleet.devices[name].missed for name in DEVICES] == [0, 0, 1, 0]
    assert fleet.devices["weak-1"].parts[1].staleness == 1


def test_trials_and_the_fitness_of_devices_are_in_the_log() -> None:
    fleet = told(
        events.RolloutStarted(round=1, devices={"weak": 1}),
        events.DeviceFitness(
            device="weak-0", tier="weak", unfit="selection.power is charging, and it is battery"
        ),
        events.RolloutJudged(round=1, promoted=False, text="3 of 4 tasks gave no update"),
    )
    texts = [entry.text for entry in fleet.log[-3:]]
    assert texts == [
        "round 1 begins the trial of the candidate: 1 of tier weak try it",
        "is left out of rounds for now: selection.power is charging, and it is battery",
        "after round 1 the candidate is taken back (3 of 4 tasks gave no update)",
    ]
    assert fleet.devices["weak-0"].log[-1].text == texts[1]


def test_what_is_told_twice_changes_nothing() -> None:
    once = told(*report("strong-0"), DECLINED, ENDED)
    twice = told(*report("strong-0"), *report("strong-0"), DECLINED, DECLINED, ENDED, ENDED)

    for name in DEVICES:
        first, second = (summary.device_row(fleet, fleet.devices[name]) for fleet in (once, twice))
        assert (first.reports, first.missed, first.seconds) == (second.reports, second.missed, second.seconds)
    assert FleetSnapshot(once).round(1).reasons == FleetSnapshot(twice).round(1).reasons


def test_a_device_stands_where_it_said_last() -> None:
    seen = DeviceSeen(device="weak-1", tier="weak", round=1, stage="train", step=3, steps=10, loss=0.7)
    fleet = told(*report("strong-0"), DECLINED, seen, events.DeviceLost(device="strong-1", tier="strong"))

    states = {name: summary.state_of(fleet, device) for name, device in fleet.devices.items()}

    assert states == dict(zip(DEVICES, ["reported", "offline", "declined", "working"], strict=True))
    row = summary.device_row(fleet, fleet.devices["weak-1"])
    assert (row.stage, row.step, row.steps, row.loss) == ("train", 3, 10, 0.7)
    found = [
        [each.name for each in view.of(fleet)]
        for view in (DeviceFilter(q="WEAK"), DeviceFilter(tier="strong", state="offline"))
    ]
    assert found == [["weak-0", "weak-1"], ["strong-1"]]


def test_a_refused_update_ends_the_part_of_its_device() -> None:
    refused = Rejected(device="weak-1", round=1, reason="not-finite", text="NaN")
    fleet = told(refused)

    assert summary.state_of(fleet, fleet.devices["weak-1"]) == "rejected"
    assert FleetSnapshot(fleet).round(1).reasons == {"not-finite": 1}


def test_another_run_begins_with_nothing_of_the_last() -> None:
    fleet = told(*report("strong-0"))
    fold.apply(fleet, 20.0, started("another"))

    assert (fleet.run, fleet.devices, fleet.rounds, fleet.edition) == ("another", {}, {}, 1)


def test_a_run_that_was_rolled_back_says_which_rounds_count_no_more() -> None:
    undone = events.Ordered(order="rollback", by="operator", done=True, version=0)
    fleet = told(*report("strong-0"), ENDED, undone)

    assert fleet.rounds[1].state == "undone"


def test_orders_and_phases_are_known() -> None:
    fleet = told()
    fold.apply(fleet, 11.0, events.Ordered(order="pause", by="operator", done=True))
    assert (fleet.phase, fleet.paused) == ("open", True)
    fold.apply(fleet, 12.0, events.Ordered(order="resume", by="operator", done=True))
    fold.apply(fleet, 13.0, events.Stopped(next_round=2, rounds=3))
    assert (fleet.phase, fleet.paused, fleet.log[-1].text) == ("stopped", False, "stopped; round 2 is next")


def test_of_rounds_that_are_long_over_the_sums_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "MOST_PARTS", 8)
    fleet = told(*report("strong-0"), *report("strong-1"), ENDED)
    before = FleetSnapshot(fleet).round(1)

    for number in (2, 3):
        fold.apply(fleet, 30.0, RoundOpened(round=number, goal=4, devices=DEVICES, deadline=60.0))

    assert fleet.rounds[1].parts == {} and fleet.kept == 4 + 4
    assert FleetSnapshot(fleet).round(1) == before
    assert 1 not in fleet.devices["strong-0"].parts


def test_logs_are_bounded() -> None:
    fleet = told()
    for number in range(10 * fleets.MOST_LOG):
        fold.apply(fleet, 20.0, events.DeviceFailed(device="weak-0", round=1, text=str(number)))

    assert fleets.MOST_LOG <= len(fleet.log) < 2 * fleets.MOST_LOG
    assert len(fleet.devices["weak-0"].log) < 2 * fleets.MOST_DEVICE_LOG
    assert fleet.log[-1].text == str(10 * fleets.MOST_LOG - 1)


def test_the_journal_and_the_feed_of_a_run_tell_the_same_rounds(tmp_path: Path) -> None:
    made = SyntheticRun(tmp_path, devices=9, rounds=3)
    made.write_past()
    made.close()
    whole = FolderSource(tmp_path).begin()
    for name in ("events.jsonl", "history.jsonl"):
        (tmp_path / name).unlink()

    alone = FolderSource(tmp_path).begin()

    assert (whole.federation, whole.problem, alone.problem) == (FEDERATION, "", "")
    assert whole.devices.keys() == alone.devices.keys()
    for number in (1, 2, 3):
        ours, theirs = FleetSnapshot(whole).round(number), FleetSnapshot(alone).round(number)
        for name in (
            "selected",
            "arrived",
            "declined",
            "missing",
            "accuracy",
            "seconds",
            "up_bytes",
            "state",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
    facts = alone.devices["weak-0002"].facts
    assert facts is not None and (facts.cores, facts.samples) == (2, 600)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "50%25 of #1?"
    made = SyntheticRun(folder, devices=3, rounds=1)
    made.write_past()
    made.close()
    (folder / "events.jsonl").unlink()

    found = FolderSource(folder).begin()

    assert (found.problem, len(found.devices), found.rounds[1].state) == ("", 3, "closed")


def test_a_round_whose_updates_are_being_added_up_is_open_still(tmp_path: Path) -> None:
    made = SyntheticRun(tmp_path, devices=3, rounds=1)
    made.write_past()
    made.open_round(2)
    made.close()
    with closing(
        Journal(f"sqlite:///{tmp_path}/journal.sqlite", FEDERATION, UpdateFiles(tmp_path))
    ) as journal:
        journal.stop_taking(RUN, 2)
    (tmp_path / "events.jsonl").unlink()

    found = FolderSource(tmp_path).begin()

    assert (found.rounds[2].state, found.phase, found.current) == ("open", "open", 2)
    assert {part.status for part in found.rounds[2].parts.values()} == {"open"}


def test_a_journal_that_cannot_be_read_is_a_problem_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database at all" * 100)

    assert "the journal cannot be read" in FolderSource(tmp_path).begin().problem


def test_all_values_lie_in_a_histogram() -> None:
    made = histogram(3, [1.0, 2.0, 2.5, 9.0])
    assert sum(made.counts) == 4 and made.counts[0] >= 1 and made.counts[-1] == 1
    assert sum(histogram(1, [0.0, 0.0]).counts) == 2


def test_of_an_earlier_run_in_the_feed_nothing_is_shown(tmp_path: Path) -> None:
    feed = FeedWriter(tmp_path, lambda: 5.0)
    feed.take(DeviceJoined(device="of-the-first", tier="strong"))
    for run in ("first", "second", "second"):
        feed.take(started(run))
        feed.take(DeviceJoined(device=f"of-{run}", tier="strong"))
    feed.close()

    fleet = FolderSource(tmp_path).begin()

    assert (fleet.run, list(fleet.devices)) == ("second", ["of-second"])
