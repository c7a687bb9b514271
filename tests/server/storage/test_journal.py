"""What survives: a journal that was never closed, opened again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.wire.mqtt.messages import Conditions, Hello, encode
from edgefl.wire.mqtt.topics import NO_SHARD, PublishTraffic
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.record import Participation, Turnout
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.events import TierResult
from edgefl_server.storage import tables, update_storage
from edgefl_server.storage.journal import Journal, RunRecord
from edgefl_server.storage.round_table import RoundOver
from edgefl_server.storage.update_storage import UpdateFiles
from edgefl_server.storage.update_table import AcceptedUpdate
from tests.support.errors import StoreError, refuses

RUN = RunRecord("run", "digest", 1)
ASSIGNMENTS = {
    name: Assignment(name, "strong", 2**63 - 1 - n, f"nonce-{name}", weight_limit=7, round=1)
    for n, name in enumerate(["a", "b", "c"])
}
ROUND = OpenRound(1, "v" * 64, 10.5, 20.5, 2, Assignments(ASSIGNMENTS))


def of_number(number: int) -> OpenRound:
    tasks = {name: replace(task, round=number) for name, task in ASSIGNMENTS.items()}
    return replace(ROUND, number=number, assignments=Assignments(tasks))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'journal.sqlite'}"


@pytest.fixture
def journal(url: str) -> Journal:
    """A journal with an open round: ``a`` accepted, ``b`` refused, ``c`` silent. Never closed, as after kill -9."""
    journal = opened(url)
    journal.begin_run(RUN)
    journal.save_devices([(RosterEntry("a", "strong", 7, True, 1.0), b"hello")])
    journal.open_round("run", ROUND, b"units")
    accept(journal, "a", b"bytes of a")
    assert journal.reject(
        "run", 1, "b", "nonce-b", "sha", "not-finite", "NaN", step=1, final=ASSIGNMENTS["b"]
    )
    return journal


def opened(url: str, federation: str = "demo", most_rows: int = 1000) -> Journal:
    return Journal(url, federation, UpdateFiles(folder_of(url) / "updates"), most_rows=most_rows)


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///")).parent


def accept(journal: Journal, device: str, data: bytes, number: int = 1) -> None:
    journal.accept("run", number, [good(device, data, number)])


def good(device: str, data: bytes, number: int = 1) -> AcceptedUpdate:
    return AcceptedUpdate(
        replace(ASSIGNMENTS[device], round=number),
        sha256="s",
        weight=3,
        share=1.0,
        metrics={"loss": 0.5},
        down=PublishTraffic(10, 11),
        up=PublishTraffic(20, 22),
        up_float32_bytes=500,
        data=data,
    )


def test_a_journal_begins_once_the_disk_has_room(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def full(connection: sqlite3.Connection, record: object) -> None:
        wal(connection, record)
        connection.execute("PRAGMA max_page_count=5")

    wal = tables.use_write_ahead_log
    with monkeypatch.context() as patch:
        patch.setattr(tables, "use_write_ahead_log", full)
        with pytest.raises(StoreError, match="full; free some space"):
            opened(url)
    opened(url).close()


def test_a_new_process_finds_the_open_round_as_it_was(journal: Journal, url: str) -> None:
    again = opened(url)
    found = again.current_round("run")
    assert found is not None
    assert {name: a.status for name, a in found.assignments.items()} == {
        "a": "accepted",
        "b": "rejected",
        "c": "open",
    }
    assert found.assignments["c"] == ASSIGNMENTS["c"]
    assert (found.number, found.model_version, found.goal, found.deadline) == (1, "v" * 64, 2, 20.5)
    assert again.latest_run() == RUN and again.devices() == {"a": RosterEntry("a", "strong", 7, True, 1.0)}


@pytest.mark.parametrize("number", [None, 0, tables.LAYOUT - 1])
def test_a_journal_of_another_layout_is_refused(journal: Journal, url: str, number: int | None) -> None:
    """None: one of before there was a number."""
    journal.close()
    change = "DROP TABLE journal_layout" if number is None else f"UPDATE journal_layout SET number = {number}"
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        database.execute(change)

    with refuses(StoreError, url=url, layout=number or 0):
        opened(url)


def test_who_took_part_and_what_came_of_tasks_survives(journal: Journal, url: str) -> None:
    journal.end_round(
        "run",
        1,
        state="closed",
        outcome={"turnout": {"strong": [3, 1]}},
        took_part={"a": Participation(1, 1, 1), "b": Participation(1, 0, 1)},
    )
    journal.end_round("run", 2, state="abandoned", outcome={}, took_part={"a": Participation(2, 2, 2)})

    record = opened(url).record("run")
    assert dict(record.of) == {"a": Participation(2, 2, 2), "b": Participation(1, 0, 1)}
    assert record.turnouts == ({"strong": Turnout(3, 1)},) and record.fairness(2) == 0.5
    assert opened(url).record("another").fairness(2) is None


def test_the_conditions_of_a_device_are_those_of_its_last_hello(journal: Journal, url: str) -> None:
    told = Hello(
        agent="a",
        memory_bytes=1,
        cores=1,
        samples=7,
        engines={},
        conditions=Conditions(power="battery", link="wet"),
    )
    journal.save_devices([(RosterEntry("a", "strong", 7, True, 2.0), encode(told))])
    journal.save_devices([(RosterEntry("a", "strong", 7, False, 3.0), None)])
    assert opened(url).devices()["a"].conditions == Conditions(power="battery")


def test_a_new_process_replays_accepted_updates_only(journal: Journal, url: str) -> None:
    stored = list(opened(url).accepted("run", 1))
    assert [(update.device, update.weight, update.data) for update in stored] == [("a", 3, b"bytes of a")]


def test_the_bytes_go_when_the_round_ends_and_the_facts_stay(journal: Journal, url: str) -> None:
    journal.end_round("run", 1, state="closed", outcome={"seconds": 1.5})
    again = opened(url)
    assert again.current_round("run") is None
    assert again.latest_run() == RunRecord("run", "digest", 2)
    assert list((folder_of(url) / "updates").iterdir()) == []
    assert again.accepted_sha256("run", 1, "a", "nonce-a") and not again.accepted_sha256(
        "run", 1, "b", "nonce-b"
    )
    tally = again.tally("run", 1)
    assert (tally.reports, tally.rejected, tally.train_loss) == (1, 1, 0.5)
    assert (tally.down_bytes, tally.up_bytes, tally.up_float32_bytes) == (10, 20, 500)
    assert (tally.down_wire_bytes, tally.up_wire_bytes) == (11, 22)
    figures = TierResult(selected=3, reports=1, rejected=1, train_loss=0.5, down_bytes=10, up_bytes=20)
    assert tally.tiers == {"strong": figures}


def test_second_copies_are_added_to_what_accepted_updates_took(journal: Journal, url: str) -> None:
    journal.add_traffic(
        "run", 1, {"a": PublishTraffic(5, 6), "b": PublishTraffic(100, 100), "c": PublishTraffic(100, 100)}
    )
    tally = opened(url).tally("run", 1)
    assert (tally.up_bytes, tally.up_wire_bytes) == (25, 28)
    assert (tally.down_bytes, tally.down_wire_bytes) == (10, 11)


def test_updates_are_accepted_together_or_not_at_all(journal: Journal, url: str) -> None:
    for answered in ("a", "b"):  # by another process, too: a worker, or the server
        with pytest.raises(RoundOver, match="round 1 has 1 of these tasks answered"):
            journal.accept("run", 1, [good("c", b"of c"), good(answered, b"again")])
    assert [each.device for each in opened(url).accepted("run", 1)] == ["a"]

    journal.accept("run", 1, [good("c", b"")])

    stored = [(each.device, each.data) for each in opened(url).accepted("run", 1)]
    assert stored == [("a", b"bytes of a"), ("c", b"")]
    found = journal.current_round("run")
    assert found is not None and found.count("accepted") == 2


def test_a_round_that_is_being_closed_takes_nothing_from_any_process(journal: Journal, url: str) -> None:
    worker = opened(url)
    assert journal.stop_taking("run", 1) == {"a": (NO_SHARD, "s")}

    with pytest.raises(RoundOver, match="round 1 is closing"):
        accept(worker, "c", b"too late")
    assert [each.device for each in journal.accepted("run", 1)] == ["a"]

    found = worker.current_round("run")  # whoever was closing it may have been killed
    assert found is not None and found.number == 1
    worker.take_again("run")
    accept(worker, "c", b"in time after all")
    assert [each.device for each in journal.accepted("run", 1)] == ["a", "c"]


def test_each_worker_finds_the_updates_of_its_shards(journal: Journal, url: str) -> None:
    files = UpdateFiles(folder_of(url) / "updates", "worker-1")
    worker = Journal(url, "demo", files, shard_of=lambda device: 7)
    accept(worker, "c", b"of c")

    assert [(each.device, each.data) for each in journal.accepted("run", 1, {7})] == [("c", b"of c")]
    assert [each.device for each in worker.accepted("run", 1, {NO_SHARD})] == ["a"]
    assert journal.stop_taking("run", 1)["c"] == (7, "s")
    journal.end_round("run", 1, state="closed", outcome={})
    assert not list((folder_of(url) / "updates").iterdir())


def test_a_full_disk_accepts_nothing(journal: Journal, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(update_storage.os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device; free some space"):
            accept(journal, "c", b"of c")
    accept(journal, "c", b"of c, later")

    assert [each.data for each in opened(url).accepted("run", 1)] == [b"bytes of a", b"of c, later"]
    [file] = (folder_of(url) / "updates").iterdir()
    assert file.read_bytes() == b"bytes of aof c, later"


def test_bytes_that_are_gone_are_missed(journal: Journal, url: str) -> None:
    [file] = (folder_of(url) / "updates").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with refuses(StoreError, path=str(file), size=10):
        list(journal.accepted("run", 1))


def test_rows_of_old_rounds_go_and_how_they_ended_stays(url: str) -> None:
    journal = opened(url, most_rows=7)
    journal.begin_run(RUN)
    for number in range(1, 9):
        journal.open_round("run", of_number(number), b"units")
        journal.accept("run", number, [good(device, b"data", number) for device in ASSIGNMENTS])
        journal.end_round("run", number, state="closed", outcome={"number": number})

    assert [journal.tally("run", number).reports for number in range(1, 9)] == [0] * 6 + [3, 3]
    assert [outcome["number"] for _, _, outcome in journal.outcomes("run")] == list(range(1, 9))
    assert not journal.accepted_sha256("run", 6, "a", "nonce-a")
    assert journal.accepted_sha256("run", 7, "a", "nonce-a")
    assert journal.progress("run").position == 8


def test_an_update_is_accepted_once(journal: Journal) -> None:
    with pytest.raises(StoreError):
        accept(journal, "a", b"again")
    assert len(list(journal.accepted("run", 1))) == 1


def test_a_refusal_is_recorded_once(journal: Journal) -> None:
    assert not journal.reject(
        "run", 1, "b", "nonce-b", "sha", "not-finite", "NaN", step=1, final=ASSIGNMENTS["b"]
    )
    assert journal.tally("run", 1).rejected == 1


def test_a_stray_refusal_leaves_the_assignment_open(journal: Journal) -> None:
    journal.reject("run", 1, "c", "?", "sha", "wrong-nonce", "", step=1, final=None)
    found = journal.current_round("run")
    assert found is not None and found.assignments["c"].status == "open"


def test_an_outcome_grows(journal: Journal) -> None:
    journal.end_round("run", 1, state="closed", outcome={"seconds": 1.5})
    journal.add_to_outcome("run", 1, {"accuracy": 0.9})
    assert journal.outcome("run", 1) == ("closed", {"seconds": 1.5, "accuracy": 0.9})
    assert journal.outcomes("run") == [(1, "closed", {"seconds": 1.5, "accuracy": 0.9})]


def test_presence_is_updated_without_losing_the_hello(journal: Journal) -> None:
    journal.save_devices([(RosterEntry("a", "strong", 7, False, 2.0), None)])
    assert journal.devices()["a"] == RosterEntry("a", "strong", 7, False, 2.0)


def test_federations_share_a_database(journal: Journal, url: str) -> None:
    other = opened(url, "other")
    assert other.latest_run() is None and other.devices() == {} and other.count_devices() == 0
    journal.save_devices([(RosterEntry("stranger", "", 7, True, 1.0), b"hello")])
    assert journal.count_devices() == 1


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        opened(f"sqlite:///{tmp_path}/nowhere/journal.sqlite")
