"""Thread of a tracker: it gets each round once and in order, and neither its pace nor its faults reach the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from edgefl.tracking import session
from edgefl.tracking.session import Tracking
from edgefl.tracking.trackers import TrackedFile, scalars
from edgefl_server.events import RoundClosed, TierResult
from edgefl_server.storage.audit import HISTORY_NAME, HistoryWriter
from tests.support.events import device_evaluation, round_closed


class RecordingTracker:
    """Tracker that records in memory. ``fault`` is raised while it is set, and ``gate`` holds each call up."""

    def __init__(self, last: int = 0) -> None:
        self.place, self.last = "memory", last
        self.rounds: list[int] = []
        self.files: list[str] = []
        self.ended: list[bool] = []
        self.fault: Exception | None = None
        self.file_fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def record(self, number: int, values: Mapping[str, float]) -> None:
        self.gate.wait()
        if self.fault is not None:
            raise self.fault
        self.rounds.append(number)
        self.last = number

    def record_file(self, file: TrackedFile) -> None:
        if self.file_fault is not None:
            raise self.file_fault
        self.files.append(file.name)

    def end(self, *, finished: bool) -> None:
        self.ended.append(finished)


@pytest.fixture
def tracker() -> RecordingTracker:
    return RecordingTracker()


@pytest.fixture
def tracking(tracker: RecordingTracker, tmp_path: Path) -> Iterator[Tracking]:
    opened = Tracking([tracker], tmp_path / HISTORY_NAME, RoundClosed)
    yield opened
    tracker.gate.set()
    opened.close(finished=False)


def close_round(tracking: Tracking, folder: Path, number: int) -> None:
    HistoryWriter(folder).take(round_closed(number))
    tracking.notify()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rounds_go_on_while_a_tracker_is_slow(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path
) -> None:
    tracker.gate.clear()
    began = time.monotonic()
    for number in range(1, 21):
        close_round(tracking, tmp_path, number)
    assert time.monotonic() - began < 10 and not tracker.rounds
    tracker.gate.set()
    tracking.close(finished=True)

    assert tracker.rounds == list(range(1, 21)) and tracker.ended == [True]


def test_a_failed_tracker_gets_all_rounds_once_it_is_back(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_RETRY_S", 0.02)
    tracker.fault = OSError("connection refused")
    close_round(tracking, tmp_path, 1)
    wait_for(lambda: bool([*tracking.problems()]))
    close_round(tracking, tmp_path, 2)
    time.sleep(0.1)
    assert not [*tracking.problems()], "the same failure is reported once"
    tracker.fault = None
    wait_for(lambda: tracker.rounds == [1, 2])


def test_a_tracker_that_stays_away_does_not_hold_up_the_end(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path
) -> None:
    tracker.fault = RuntimeError("of a package of others")
    for number in (1, 2):
        close_round(tracking, tmp_path, number)
    tracking.close(finished=True)

    said = [*tracking.problems()]
    assert len(said) == 2 and "of a package of others" in said[0] and "lacks 2 rounds" in said[1]
    assert not tracker.ended, "the tool shows that something is missing"


def test_a_tracker_that_hangs_is_left(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_STOP_S", 0.1)
    tracker.gate.clear()
    close_round(tracking, tmp_path, 1)
    tracking.close(finished=False)

    assert "takes more than" in "".join(tracking.problems())


def test_trackers_that_hang_are_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_STOP_S", 0.5)
    trackers = [RecordingTracker() for _ in range(4)]
    for each in trackers:
        each.gate.clear()
    tracking = Tracking(trackers, tmp_path / HISTORY_NAME, RoundClosed)
    close_round(tracking, tmp_path, 1)
    began = time.monotonic()
    tracking.close(finished=False)
    lasted_s = time.monotonic() - began
    for each in trackers:
        each.gate.set()

    assert len([*tracking.problems()]) == 4 and lasted_s < 1.5


def test_a_stop_ends_the_wait_for_an_upload(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_STOP_S", 0.1)
    tracker.gate.clear()
    close_round(tracking, tmp_path, 1)
    threading.Timer(0.3, tracking.hurry).start()
    began = time.monotonic()
    tracking.close(finished=True)

    assert time.monotonic() - began < session._FINISH_S / 10


def test_files_that_fail_are_tried_again_at_the_end(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path
) -> None:
    tracker.file_fault = ImportError("boto3")
    for name in ("weak.efl", "strong.efl"):
        tracking.add_file(TrackedFile(tmp_path / name, "bundles"))
    close_round(tracking, tmp_path, 1)
    wait_for(lambda: tracker.rounds == [1])
    wait_for(lambda: bool([*tracking.problems()]))
    tracker.file_fault = None
    tracking.close(finished=True)

    assert sorted(tracker.files) == ["bundles/strong.efl", "bundles/weak.efl"]


def test_a_stopped_run_leaves_its_files_to_the_next_process(
    tracker: RecordingTracker, tracking: Tracking, tmp_path: Path
) -> None:
    tracker.file_fault = OSError("connection refused")
    tracking.add_file(TrackedFile(tmp_path / "weak.efl", "bundles"))
    wait_for(lambda: bool([*tracking.problems()]))
    tracker.file_fault = None
    tracking.close(finished=False)

    assert not tracker.files and tracker.ended == [False]


def test_a_later_process_records_what_its_tracker_lacks(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path)
    for number in (1, 2, 2, 3):  # a killed server may report a round twice
        history.take(round_closed(number))
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b'{"round": 4')  # and leave half a line
    tracker = RecordingTracker(last=1)
    with Tracking([tracker], tmp_path / HISTORY_NAME, RoundClosed) as tracking:
        close_round(tracking, tmp_path, 4)

    assert tracker.rounds == [2, 3, 4]


def test_figures_have_the_names_of_a_simulations_rows() -> None:
    tiers = {
        "strong": TierResult(selected=3, reports=2, rejected=1, train_loss=0.5, up_bytes=7),
        "weak": TierResult(selected=2, declined=2),
    }
    found = scalars(round_closed(3, tiers=tiers, evaluation=device_evaluation()))

    assert found["accuracy"] == 0.5 and found["reports"] == 2.0 and "round" not in found
    assert (found["selected"], found["declined"]) == (5.0, 2.0)
    assert found["tier.strong.train_loss"] == 0.5 and found["tier.strong.up_bytes"] == 7.0
    assert found["tier.weak.declined"] == 2.0 and "tier.weak.train_loss" not in found
    assert found["devices.accuracy"] == 0.782 and found["tier.weak.accuracy"] == 0.7
