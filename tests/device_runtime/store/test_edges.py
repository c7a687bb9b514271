"""The edges of what a store does: exact sizes, orders and counts, each with the value beside it."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import StoreError
from edgefl.wire.blobs import BlobRef, describe, split
from edgefl_device.store import database
from edgefl_device.store.carry_choice import RoundToBegin, StoredCarry, abandoned, choose, foreign
from edgefl_device.store.checkpoint_rows import Checkpoint
from edgefl_device.store.database import DECLINED, Outgoing, PastRound, Store
from tests.device_runtime.store.stores import checkpoint, open_store, step_of

CHUNK = 100


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose clock goes on by a second with each look at it."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(database.time, "time", lambda: next(seconds))
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def put(store: Store, tag: int, size: int) -> BlobRef:
    data = bytes([tag]) * size
    ref = describe(data, CHUNK)
    store.make_room([ref])
    for index, piece in enumerate(split(data, CHUNK)):
        store.put_chunk(ref, index, piece)
    return ref


def past(nonce: str, **changes: object) -> PastRound:
    fields: dict[str, object] = {"run": "run", "round": 3, "tier": "weak", "outcome": "accepted", "loss": 0.5}
    return PastRound(nonce=nonce, **{**fields, **changes})  # type: ignore[arg-type]


# -- blobs -----------------------------------------------------------------------------------------------------


def test_a_blob_of_just_the_limit_fits_and_drops_all_others(store: Store) -> None:
    first = put(store, 1, 1)

    whole = put(store, 2, 1000)

    assert (store.missing_chunks(first), store.missing_chunks(whole)) == ([0], [])


@pytest.mark.parametrize(("size", "left"), [(400, [True, True]), (401, [False, True]), (701, [False, False])])
def test_as_many_blobs_leave_as_must_and_no_more(store: Store, size: int, left: list[bool]) -> None:
    refs = [put(store, 1, 300), put(store, 2, 300)]

    put(store, 3, size)

    assert [store.missing_chunks(ref) == [] for ref in refs] == left


def test_needed_blobs_count_once(store: Store) -> None:
    first, other = put(store, 1, 600), put(store, 2, 400)

    store.make_room([first, first])

    assert store.missing_chunks(other) == []


def test_room_for_a_blob_makes_it_the_newest(store: Store) -> None:
    first, second = put(store, 1, 400), put(store, 2, 400)
    store.make_room([first])

    put(store, 3, 400)

    assert (store.missing_chunks(first), store.missing_chunks(second)) == ([], [0, 1, 2, 3])


def test_a_chunk_written_again_takes_the_place_of_the_one_before(store: Store) -> None:
    ref = describe(b"right", CHUNK)
    store.put_chunk(ref, 0, b"wrong")

    store.put_chunk(ref, 0, b"right")

    assert store.blob(ref) == b"right"


# -- history and outbox ----------------------------------------------------------------------------------------


def test_a_task_told_of_again_becomes_the_newest_with_the_newer_word(store: Store) -> None:
    for nonce in ("n1", "n2"):
        store.settle(past(nonce))

    store.settle(past("n1", outcome="rejected"))

    assert [(each.nonce, each.outcome) for each in store.history()] == [
        ("n2", "accepted"),
        ("n1", "rejected"),
    ]


def test_the_last_entry_stays_whatever_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, history=2)
    with monkeypatch.context() as ahead:
        ahead.setattr(database.time, "time", lambda: 1e12)
        for nonce in ("n1", "n2"):
            store.settle(past(nonce))

    store.settle(past("n3"))

    assert [each.nonce for each in store.history()] == ["n2", "n3"]


def test_declined_are_those_of_this_run_and_round_alone(store: Store) -> None:
    store.decline(past("n1", outcome=DECLINED))
    store.decline(past("n2", outcome=DECLINED, round=4))
    store.decline(past("n3", outcome=DECLINED, run="other"))
    store.settle(past("n4"))

    assert [each.nonce for each in store.declined("run", 3)] == ["n1"]


def test_a_word_on_one_update_leaves_the_others_waiting(store: Store) -> None:
    for nonce in ("n1", "n2"):
        store.finish_job(Outgoing("run", 3, nonce, nonce.encode()), None, "")

    store.settle(past("n2"))

    assert (store.waits("n1"), store.waits("n2")) == (True, False)
    assert store.outgoing() == Outgoing("run", 3, "n1", b"n1")


def test_a_job_opened_again_keeps_its_checkpoint(store: Store) -> None:
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))

    store.open_job(b"again")

    assert (store.job(), step_of(store)) == (b"again", 3)


@pytest.mark.parametrize("durable", ["finish_job", "decline"])
def test_what_a_server_or_person_is_told_of_is_on_the_disk_first(store: Store, durable: str) -> None:
    """The database waits for the disk in these transactions, and in no other."""
    said: list[int] = []
    store._db.set_trace_callback(
        lambda statement: (
            said.append(synchronous(store._db)) if statement.startswith("DELETE FROM job") else None
        )
    )
    if durable == "finish_job":
        store.finish_job(Outgoing("run", 3, "n1", b"update"), None, "")
    else:
        store.decline(past("n1", outcome=DECLINED))
    store._db.set_trace_callback(None)

    assert said == [2]
    assert synchronous(store._db) == 1


def synchronous(db: sqlite3.Connection) -> int:
    """SQLite's number: 1 is NORMAL, 2 is FULL."""
    return int(db.execute("PRAGMA synchronous").fetchone()[0])


def test_the_database_keeps_little_in_memory(store: Store) -> None:
    asked = ("journal_mode", "foreign_keys", "cache_size")

    assert [store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in asked] == ["wal", 1, -256]


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16])
def test_tensors_around_the_size_of_a_piece_come_back(store: Store, size: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    store.save_checkpoint("n1", Checkpoint(1, {}, [("t", array)]))

    saved = store.checkpoint("n1")

    assert saved is not None
    np.testing.assert_array_equal(dict(saved.tensors)["t"], array)


# -- whose store, and where ------------------------------------------------------------------------------------


def test_a_store_opened_without_a_name_belongs_to_who_names_it_first(tmp_path: Path) -> None:
    sizes = {"limit_bytes": 1000, "history_rounds": 5}
    Store(tmp_path, **sizes).close()
    Store(tmp_path, device="phone", **sizes).close()
    Store(tmp_path, federation="demo", **sizes).close()

    with pytest.raises(StoreError, match="belongs to device phone of federation demo, not to tablet of demo"):
        Store(tmp_path, federation="demo", device="tablet", **sizes)
    Store(tmp_path, **sizes).close()


@pytest.mark.parametrize("layout", [0, 1, 4, -1])
def test_a_file_of_another_layout_is_refused(tmp_path: Path, layout: int) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        db.execute(f"PRAGMA user_version={layout}")
    db.close()

    with pytest.raises(StoreError, match=f"has layout {layout}, this runtime reads 3") as refusal:
        open_store(tmp_path)

    assert refusal.value.details == {"layout": layout}
    with sqlite3.connect(tmp_path / "store.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (layout,)
        db.execute("PRAGMA user_version=3")
    db.close()
    open_store(tmp_path).close()


def test_a_store_makes_the_folders_above_it(tmp_path: Path) -> None:
    open_store(tmp_path / "a" / "b").close()

    assert (tmp_path / "a" / "b" / "store.sqlite3").is_file()


# -- which carry stands ----------------------------------------------------------------------------------------


def carry(number: int, *, name: str = "run/p/weak", waits: bool = False) -> StoredCarry:
    return StoredCarry(number, name, f"n{number}", number, waits)


def next_after(base: int) -> RoundToBegin:
    return RoundToBegin("run", "run/p/weak", base + 1, base)


@pytest.mark.parametrize(
    ("exchanges", "base", "stands"),
    [(0, 99, True), (1, 5, True), (1, 6, False), (3, 7, True), (3, 8, False)],
)
def test_a_carry_is_good_for_its_number_of_completed_rounds(exchanges: int, base: int, stands: bool) -> None:
    choice = choose([carry(5)], next_after(base), exchanges)

    assert choice.carry == (carry(5) if stands else None)
    assert [each.carry for each in choice.void] == ([] if stands else [carry(5)])


@pytest.mark.parametrize(("exchanges", "rounds"), [(1, "1 completed round"), (2, "2 completed rounds")])
def test_one_that_is_too_old_says_for_how_many_rounds_it_was_good(exchanges: int, rounds: str) -> None:
    [void] = choose([carry(5)], next_after(9), exchanges).void

    assert void.why == f"it was good for {rounds} after it, and round 9 is completed"


def test_rounds_up_to_the_last_completed_one_are_not_abandoned() -> None:
    carries = [carry(number) for number in (4, 5, 6, 7)]

    assert [row.round for row in abandoned(carries, 5, None)] == [6, 7]
    assert [row.round for row in abandoned(carries, 5, 7)] == [6]
    assert abandoned(carries, 0, 4) == []
    assert [row.round for row in abandoned([carry(1)], 0, None)] == [1]
    assert abandoned(carries, 7, None) == []


def test_another_run_may_begin_with_the_same_letters() -> None:
    assert foreign([carry(1), carry(2, name="run2/p/weak")], "run") == [carry(2, name="run2/p/weak")]


@pytest.mark.parametrize(
    ("waiting", "superseded"),
    [((), [1, 2]), ((3,), [1]), ((2, 3), []), ((2,), [1, 2]), ((1, 2, 3), [])],
)
def test_carries_before_the_settled_are_superseded(waiting: tuple[int, ...], superseded: list[int]) -> None:
    choice = choose([carry(n, waits=n in waiting) for n in (1, 2, 3)], next_after(3), 0)

    assert choice.carry is not None and choice.carry.round == 3
    assert [row.round for row in choice.superseded] == superseded
    assert choice.void == ()


def test_carries_of_other_tiers_of_the_run_are_left_alone() -> None:
    choice = choose([carry(1, name="run/p/strong"), carry(2)], next_after(2), 0)

    assert (choice.carry, choice.void, choice.superseded) == (carry(2), (), ())
