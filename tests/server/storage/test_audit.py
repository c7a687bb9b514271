"""The log of a run's rounds: what was changed, removed, added or moved is found, and a kill leaves a whole chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edgefl.errors import DataError
from edgefl_server import events
from edgefl_server.storage.audit import MOST_REJECTED, NAME, AuditLog, HistoryWriter, verify
from tests.support.events import round_closed

DEVICES = ("a", "b")


def accepted(device: str, number: int) -> events.UpdateAccepted:
    return events.UpdateAccepted(
        device=device, tier="t", round=number, nonce=f"n{number}", sha256="5" * 64, weight=1
    )


def rejected(device: str) -> events.Rejected:
    return events.Rejected(device=device, round=1, reason="stale", text="late")


def told(audit: AuditLog, *happened: events.Event) -> None:
    for event in happened:
        assert audit.take(event) is None


def started() -> events.Started:
    return events.Started(
        federation="f", run="r", rounds=2, next_round=1, resumed=False, model_version="m", device="cpu"
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two rounds of two devices."""
    audit, history = AuditLog(tmp_path, clock=lambda: 1.5), HistoryWriter(tmp_path)
    told(audit, started())
    for number in (1, 2):
        told(audit, events.RoundOpened(round=number, goal=2, devices=DEVICES, deadline=9.0))
        told(audit, *(accepted(device, number) for device in DEVICES), round_closed(number))
        history.take(round_closed(number))
    return tmp_path / NAME


def test_a_log_that_nobody_touched_is_whole(log: Path) -> None:
    found = verify(log.parent)

    assert (found.lines, found.rounds, found.updates, found.problems) == (9, 2, 4, ())
    assert msgspec.json.decode(log.read_bytes().splitlines()[-1])["hash"] == found.head


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b'"weight":1', b'"weight":9'), *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "line 4"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "line 3"),
        (lambda lines: [b"{}", *lines], "line 1"),
        (lambda lines: [*lines[:2], b"\xff\xfe", *lines[3:]], "line 3"),
        (lambda lines: lines[:-4], "round 2: history.jsonl has weights"),
    ],
    ids=["changed", "removed", "twice", "moved", "added", "garbage", "cut off"],
)
def test_what_was_done_to_it_is_named(
    log: Path, tamper: Callable[[list[bytes]], list[bytes]], words: str
) -> None:
    log.write_bytes(b"\n".join(tamper(log.read_bytes().splitlines())) + b"\n")

    assert any(words in problem for problem in verify(log.parent).problems)


def test_half_a_line_of_a_killed_server_goes_and_the_chain_goes_on(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-30])

    told(AuditLog(log.parent), round_closed(2), events.Stopped(next_round=3, rounds=2))

    found = verify(log.parent)
    assert (found.lines, found.problems) == (10, ())


def test_an_update_that_is_told_again_after_a_restart_stands_there_once(log: Path) -> None:
    told(AuditLog(log.parent), accepted("a", 2), accepted("a", 3))

    assert verify(log.parent).updates == 5


def test_a_restarted_audit_forgets_past_rounds(log: Path) -> None:
    audit = AuditLog(log.parent)
    told(audit, started())

    assert audit._tail is not None
    assert audit._tail.accepted == {("r", "2", device, "n2") for device in DEVICES}


def test_strangers_and_floods_do_not_fill_it(log: Path) -> None:
    audit = AuditLog(log.parent)
    told(audit, events.RoundOpened(round=3, goal=2, devices=DEVICES, deadline=9.0))
    told(audit, *(rejected(device) for device in ("a", "stranger") for _ in range(100)))

    lines = log.read_bytes().splitlines()
    assert sum(b'"rejected"' in line and b'"reason"' in line for line in lines) == MOST_REJECTED
    assert not any(b"stranger" in line for line in lines)


def test_a_full_disk_is_told_and_the_next_line_stands_whole(log: Path, tmp_path: Path) -> None:
    audit = AuditLog(log.parent)
    told(audit, accepted("a", 3))  # it has read the file: /dev/full has no end
    whole = log.read_bytes()
    log.unlink()
    log.symlink_to("/dev/full")
    assert audit.take(round_closed(3)) is not None
    log.unlink()
    log.write_bytes(whole)

    told(audit, round_closed(3))

    assert verify(log.parent).problems == ()


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no audit\.jsonl"):
        verify(tmp_path)


def test_what_is_kept_in_memory_is_of_the_open_round(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    told(audit, started())
    for number in range(1, 20):
        told(audit, events.RoundOpened(round=number, goal=2, devices=DEVICES, deadline=9.0))
        told(audit, *(accepted(device, number) for device in DEVICES), round_closed(number))
    for number in range(100):
        told(audit, rejected(f"stranger-{number}"))

    assert audit._tail is not None and len(audit._tail.accepted) == len(DEVICES)
    assert not audit._rejected and verify(tmp_path).updates == 38
