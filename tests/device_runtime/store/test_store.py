"""The device's memory: bounded, durable, and never half-written."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from edgefl.wire.blobs import BlobRef, describe, split
from edgefl_device.round.carry import RoundToBegin, StoredCarry, abandoned, choose
from edgefl_device.store import database
from edgefl_device.store.database import DECLINED, Checkpoint, Outgoing, PastRound, Store
from tests.device_runtime.store.stores import carry_of, checkpoint, open_store, run_sql, step_of
from tests.support.errors import StoreError, refuses

CHUNK = 100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def put(store: Store, data: bytes) -> BlobRef:
    ref = describe(data, CHUNK)
    store.make_room([ref])
    for index, piece in enumerate(split(data, CHUNK)):
        store.put_chunk(ref, index, piece)
    return ref


def outgoing(nonce: str, data: bytes = b"update") -> Outgoing:
    return Outgoing("run", 3, nonce, data)


def past(nonce: str, outcome: str = "accepted") -> PastRound:
    return PastRound(run="run", round=3, tier="weak", nonce=nonce, outcome=outcome, loss=0.5)


# -- blobs -----------------------------------------------------------------------------------------------------


def test_chunks_in_any_order_join_to_the_blob(store: Store) -> None:
    data = bytes(range(250))
    ref = describe(data, CHUNK)
    pieces = list(split(data, CHUNK))

    store.put_chunk(ref, 2, pieces[2])
    assert store.missing_chunks(ref) == [0, 1]
    store.put_chunk(ref, 0, pieces[0])
    store.put_chunk(ref, 1, pieces[1])
    store.put_chunk(ref, 1, pieces[1])

    assert store.missing_chunks(ref) == []
    assert store.blob(ref) == data


def test_chunks_are_kept_together_or_not_at_all(store: Store) -> None:
    ref = describe(bytes(150), CHUNK)

    with pytest.raises(StoreError):
        store.put_chunks([((ref, 0), bytes(CHUNK)), ((ref, 1), cast(bytes, None))])

    assert store.missing_chunks(ref) == [0, 1]


def test_more_blobs_than_a_query_takes_are_asked_for(store: Store) -> None:
    refs = [describe(number.to_bytes(4, "big"), CHUNK) for number in range(1201)]
    here = refs[::400]
    store.put_chunks(
        [((ref, 0), number.to_bytes(4, "big")) for number, ref in zip(range(0, 1201, 400), here, strict=True)]
    )

    assert store.missing(refs) == [(ref, 0) for ref in refs if ref not in here]


def test_the_least_recently_used_blob_leaves_first(store: Store) -> None:
    first, second, third = (put(store, bytes([tag]) * 300) for tag in (1, 2, 3))
    store.touch([first])

    put(store, b"\4" * 300)

    assert [store.missing_chunks(ref) for ref in (first, second, third)] == [[], [0, 1, 2], []]


def test_blobs_that_are_needed_now_stay(store: Store) -> None:
    first, second = put(store, b"\1" * 400), put(store, b"\2" * 400)
    third = describe(b"\3" * 400, CHUNK)

    store.make_room([first, third])

    assert store.missing_chunks(first) == []
    assert store.missing_chunks(second) != []


def test_more_than_the_store_may_hold_is_refused_and_nothing_is_dropped(store: Store) -> None:
    first = put(store, b"\1" * 400)

    with pytest.raises(StoreError, match="needs 1001 bytes of blobs, the store may hold 1000") as caught:
        store.make_room([describe(bytes(1001), CHUNK)])

    assert caught.value.details == {"needed": 1001, "limit": 1000}
    assert store.missing_chunks(first) == []


def test_a_dropped_blob_is_missing_whole(store: Store) -> None:
    ref = put(store, bytes(250))

    store.drop_blob(ref)

    assert store.missing_chunks(ref) == [0, 1, 2]
    assert store.blob(ref) == b""


# -- the open round --------------------------------------------------------------------------------------------


def test_a_closed_job_takes_its_checkpoint_along(store: Store) -> None:
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))

    store.close_job()

    assert (store.job(), store.checkpoint("n1")) == (None, None)
    assert run_sql(store, "SELECT * FROM checkpoint_tensors") == []


def test_job_and_checkpoint_survive_a_process_that_did_not_close(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))
    store._unlock()  # as the kernel does for a killed process

    again = open_store(tmp_path)

    assert (again.job(), step_of(again)) == (b"job", 3)
    again.close()
    store.close()


# -- outbox ----------------------------------------------------------------------------------------------------


def test_a_finished_job_becomes_an_update_that_waits(store: Store) -> None:
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))

    store.finish_job(outgoing("n1"), b"carry bytes", "run/sgd")

    assert store.outgoing() == outgoing("n1") and store.any_waits()
    assert store.waits("n1")
    assert (store.job(), store.checkpoint("n1")) == (None, None)
    assert carry_of(store, "run/sgd") == b"carry bytes"


def test_the_oldest_update_goes_first(store: Store) -> None:
    for nonce in ("b", "a", "c"):
        store.finish_job(outgoing(nonce), None, "")

    assert store.outgoing() == outgoing("b")
    store.settle(past("b"))
    assert store.outgoing() == outgoing("a")


def test_an_update_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from edgefl_device.store.database import *;"
        "s = Store(Path(sys.argv[1]), limit_bytes=1000, history_rounds=5); s.open_job(b'job');"
        "s.finish_job(Outgoing('run', 3, 'n1', b'update'), b'carry', 'c'); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=300)

    store = open_store(tmp_path)

    assert ended.returncode == -9
    assert (store.outgoing(), store.job(), carry_of(store, "c")) == (outgoing("n1"), None, b"carry")
    store.close()


def test_a_declined_task_ends_its_job_and_is_remembered(store: Store) -> None:
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))

    store.decline(past("n1", DECLINED))

    assert (store.job(), store.checkpoint("n1"), store.outgoing()) == (None, None, None)
    assert store.declined("run", 3) == [past("n1", DECLINED)]
    assert store.declined("run", 4) == store.declined("another", 3) == []


def test_finishing_a_job_happens_whole_or_not_at_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open_job(b"job")
    store.save_checkpoint("n1", checkpoint(3))
    run_sql(store, "CREATE TRIGGER fail BEFORE DELETE ON checkpoint BEGIN SELECT RAISE(ABORT, 'full'); END")

    with pytest.raises(StoreError, match="full"):
        store.finish_job(outgoing("n1"), b"carry", "c")

    assert (store.outgoing(), carry_of(store, "c")) == (None, None)
    assert store.job() == b"job"
    assert step_of(store) == 3
    store.close()


# -- history ---------------------------------------------------------------------------------------------------


def test_a_settled_update_leaves_the_outbox_and_enters_history(store: Store) -> None:
    store.finish_job(outgoing("n1"), None, "")

    store.settle(past("n1", "rejected"))

    assert (store.outgoing(), store.waits("n1"), store.any_waits()) == (None, False, False)
    assert store.past("n1") == past("n1", "rejected")
    assert store.past("n2") is None


def test_history_is_bounded_and_forgets_the_oldest(store: Store) -> None:
    for index in range(9):
        store.settle(past(f"n{index}"))

    assert [entry.nonce for entry in store.history()] == ["n4", "n5", "n6", "n7", "n8"]


# -- what cannot be used ---------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    file.write_bytes(b"this is my diary, not a database. " * 100)

    with pytest.raises(StoreError, match="move it away to start afresh"):
        open_store(tmp_path)
    assert file.read_bytes().startswith(b"this is my diary")


def test_a_folder_where_the_file_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").mkdir()

    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(tmp_path)


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")

    with pytest.raises(StoreError, match="state"):
        open_store(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    with pytest.raises(StoreError):
        open_store(tmp_path)


def test_a_store_damaged_in_use_raises_store_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ref = put(store, bytes(250))
    store.close()
    file = tmp_path / "store.sqlite3"
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    file.write_bytes(bytes(data))

    with pytest.raises(StoreError):
        damaged = open_store(tmp_path)
        damaged.blob(ref)
        damaged.settle(past("n1"))


def test_every_method_of_a_store_with_missing_tables_raises_store_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    other = sqlite3.connect(tmp_path / "store.sqlite3")
    for table in ("chunks", "blobs", "job", "checkpoint", "outbox", "carries", "history"):
        other.execute(f"DROP TABLE {table}")
    other.commit()
    other.close()
    ref = describe(b"x", CHUNK)

    for call in (
        lambda: store.missing_chunks(ref),
        lambda: store.put_chunk(ref, 0, b"x"),
        lambda: store.make_room([ref]),
        lambda: store.touch([ref]),
        lambda: store.blob(ref),
        lambda: store.drop_blob(ref),
        lambda: store.open_job(b""),
        store.job,
        store.close_job,
        lambda: store.save_checkpoint("n", checkpoint(0)),
        lambda: store.checkpoint("n"),
        lambda: store.finish_job(outgoing("n"), None, ""),
        store.outgoing,
        lambda: store.waits("n"),
        lambda: store.settle(past("n")),
        store.carries,
        lambda: store.carry(StoredCarry(1, "run/p/t", "n", 1, False)),
        lambda: store.drop_carries([StoredCarry(1, "run/p/t", "n", 1, False)]),
        lambda: store.decline(past("n")),
        lambda: store.declined("run", 1),
        store.history,
        lambda: store.past("n"),
    ):
        with pytest.raises(StoreError):
            call()
    store.close()


# -- whose store it is -----------------------------------------------------------------------------------------


def test_a_store_of_another_federation_or_device_is_refused(tmp_path: Path) -> None:
    owned = {"limit_bytes": 1000, "history_rounds": 5}
    Store(tmp_path, federation="demo", device="phone", **owned).close()  # type: ignore[arg-type]

    Store(tmp_path, federation="demo", device="phone", **owned).close()  # type: ignore[arg-type]
    for federation, device in (("other", "phone"), ("demo", "tablet")):
        with refuses(StoreError, federation="demo", device="phone"):
            Store(tmp_path, federation=federation, device=device, **owned)  # type: ignore[arg-type]
    Store(tmp_path, federation="demo", device="phone", **owned).close()  # type: ignore[arg-type]


def test_a_store_without_room_asks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(database, "_SCHEMA", f"PRAGMA max_page_count=1;{database._SCHEMA}")
        with pytest.raises(
            StoreError, match=r"store\.sqlite3 cannot be opened: .*full; free some space there"
        ):
            open_store(tmp_path)
    open_store(tmp_path).close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that wait for another agent's end as good as not."""
    monkeypatch.setattr(database, "_LOCK_PATIENCE_S", 0.05)


def test_two_agents_cannot_share_a_store(impatient: None, tmp_path: Path) -> None:
    store = open_store(tmp_path)

    with pytest.raises(StoreError, match=rf"a device already runs on this store .*process {os.getpid()}\)"):
        open_store(tmp_path)

    store.close()
    open_store(tmp_path).close()


def test_the_lock_of_a_store_does_not_survive_its_process(impatient: None, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from edgefl_device.store.database import Store;"
        "s = Store(Path(sys.argv[1]), limit_bytes=1000, history_rounds=5); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    with pytest.raises(StoreError, match="already runs"):
        open_store(tmp_path)

    process.kill()
    process.wait(60)
    process.stdout.close()

    open_store(tmp_path).close()


def test_an_empty_blob_is_whole_without_any_chunk(store: Store) -> None:
    ref = describe(b"", CHUNK)

    assert store.missing_chunks(ref) == []
    assert store.blob(ref) == b""


def test_a_job_opened_afresh_has_no_checkpoint(store: Store) -> None:
    store.save_checkpoint("n1", checkpoint(3))
    store.open_job(b"same model")
    assert store.checkpoint("n1") is not None

    store.open_job(b"other model", fresh=True)

    assert (store.job(), store.checkpoint("n1")) == (b"other model", None)


# -- the edges of what a store does: exact sizes, orders and counts, each with the value beside it ---------


@pytest.fixture
def edges_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose clock goes on by a second with each look at it."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(database.time, "time", lambda: next(seconds))
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def edges_put(store: Store, tag: int, size: int) -> BlobRef:
    data = bytes([tag]) * size
    ref = describe(data, CHUNK)
    store.make_room([ref])
    for index, piece in enumerate(split(data, CHUNK)):
        store.put_chunk(ref, index, piece)
    return ref


def edges_past(nonce: str, **changes: object) -> PastRound:
    fields: dict[str, object] = {"run": "run", "round": 3, "tier": "weak", "outcome": "accepted", "loss": 0.5}
    return PastRound(nonce=nonce, **{**fields, **changes})  # type: ignore[arg-type]


# -- blobs -----------------------------------------------------------------------------------------------------


def test_a_blob_of_just_the_limit_fits_and_drops_all_others(edges_store: Store) -> None:
    first = edges_put(edges_store, 1, 1)

    whole = edges_put(edges_store, 2, 1000)

    assert (edges_store.missing_chunks(first), edges_store.missing_chunks(whole)) == ([0], [])


@pytest.mark.parametrize(("size", "left"), [(400, [True, True]), (401, [False, True]), (701, [False, False])])
def test_as_many_blobs_leave_as_must_and_no_more(edges_store: Store, size: int, left: list[bool]) -> None:
    refs = [edges_put(edges_store, 1, 300), edges_put(edges_store, 2, 300)]

    edges_put(edges_store, 3, size)

    assert [edges_store.missing_chunks(ref) == [] for ref in refs] == left


def test_needed_blobs_count_once(edges_store: Store) -> None:
    first, other = edges_put(edges_store, 1, 600), edges_put(edges_store, 2, 400)

    edges_store.make_room([first, first])

    assert edges_store.missing_chunks(other) == []


def test_room_for_a_blob_makes_it_the_newest(edges_store: Store) -> None:
    first, second = edges_put(edges_store, 1, 400), edges_put(edges_store, 2, 400)
    edges_store.make_room([first])

    edges_put(edges_store, 3, 400)

    assert (edges_store.missing_chunks(first), edges_store.missing_chunks(second)) == ([], [0, 1, 2, 3])


def test_a_chunk_written_again_takes_the_place_of_the_one_before(edges_store: Store) -> None:
    ref = describe(b"right", CHUNK)
    edges_store.put_chunk(ref, 0, b"wrong")

    edges_store.put_chunk(ref, 0, b"right")

    assert edges_store.blob(ref) == b"right"


# -- history and outbox ----------------------------------------------------------------------------------------


def test_a_task_told_of_again_becomes_the_newest_with_the_newer_word(edges_store: Store) -> None:
    for nonce in ("n1", "n2"):
        edges_store.settle(edges_past(nonce))

    edges_store.settle(edges_past("n1", outcome="rejected"))

    assert [(each.nonce, each.outcome) for each in edges_store.history()] == [
        ("n2", "accepted"),
        ("n1", "rejected"),
    ]


def test_the_last_entry_stays_whatever_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, history=2)
    with monkeypatch.context() as ahead:
        ahead.setattr(database.time, "time", lambda: 1e12)
        for nonce in ("n1", "n2"):
            store.settle(edges_past(nonce))

    store.settle(edges_past("n3"))

    assert [each.nonce for each in store.history()] == ["n2", "n3"]


def test_declined_are_those_of_this_run_and_round_alone(edges_store: Store) -> None:
    edges_store.decline(edges_past("n1", outcome=DECLINED))
    edges_store.decline(edges_past("n2", outcome=DECLINED, round=4))
    edges_store.decline(edges_past("n3", outcome=DECLINED, run="other"))
    edges_store.settle(edges_past("n4"))

    assert [each.nonce for each in edges_store.declined("run", 3)] == ["n1"]


def test_a_word_on_one_update_leaves_the_others_waiting(edges_store: Store) -> None:
    for nonce in ("n1", "n2"):
        edges_store.finish_job(Outgoing("run", 3, nonce, nonce.encode()), None, "")

    edges_store.settle(edges_past("n2"))

    assert (edges_store.waits("n1"), edges_store.waits("n2")) == (True, False)
    assert edges_store.outgoing() == Outgoing("run", 3, "n1", b"n1")


def test_a_job_opened_again_keeps_its_checkpoint(edges_store: Store) -> None:
    edges_store.open_job(b"job")
    edges_store.save_checkpoint("n1", checkpoint(3))

    edges_store.open_job(b"again")

    assert (edges_store.job(), step_of(edges_store)) == (b"again", 3)


@pytest.mark.parametrize("durable", ["finish_job", "decline"])
def test_what_a_server_or_person_is_told_of_is_on_the_disk_first(edges_store: Store, durable: str) -> None:
    """The database waits for the disk in these transactions, and in no other."""
    said: list[int] = []
    edges_store._db.set_trace_callback(
        lambda statement: (
            said.append(synchronous(edges_store._db)) if statement.startswith("DELETE FROM job") else None
        )
    )
    if durable == "finish_job":
        edges_store.finish_job(Outgoing("run", 3, "n1", b"update"), None, "")
    else:
        edges_store.decline(edges_past("n1", outcome=DECLINED))
    edges_store._db.set_trace_callback(None)

    assert said == [2]
    assert synchronous(edges_store._db) == 1


def synchronous(db: sqlite3.Connection) -> int:
    """SQLite's number: 1 is NORMAL, 2 is FULL."""
    return int(db.execute("PRAGMA synchronous").fetchone()[0])


def test_the_database_keeps_little_in_memory(edges_store: Store) -> None:
    asked = ("journal_mode", "foreign_keys", "cache_size")

    assert [edges_store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in asked] == ["wal", 1, -256]


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16])
def test_tensors_around_the_size_of_a_piece_come_back(edges_store: Store, size: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    edges_store.save_checkpoint("n1", Checkpoint(1, {}, [("t", array)]))

    saved = edges_store.checkpoint("n1")

    assert saved is not None
    np.testing.assert_array_equal(dict(saved.tensors)["t"], array)


# -- whose store, and where ------------------------------------------------------------------------------------


def test_a_store_opened_without_a_name_belongs_to_who_names_it_first(tmp_path: Path) -> None:
    sizes = {"limit_bytes": 1000, "history_rounds": 5}
    Store(tmp_path, **sizes).close()
    Store(tmp_path, device="phone", **sizes).close()
    Store(tmp_path, federation="demo", **sizes).close()

    with refuses(StoreError, device="phone", federation="demo"):
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


def test_rounds_up_to_the_last_completed_one_are_not_abandoned() -> None:
    carries = [carry(number) for number in (4, 5, 6, 7)]

    assert [row.round for row in abandoned(carries, 5, None)] == [6, 7]
    assert [row.round for row in abandoned(carries, 5, 7)] == [6]
    assert abandoned(carries, 0, 4) == []
    assert [row.round for row in abandoned([carry(1)], 0, None)] == [1]
    assert abandoned(carries, 7, None) == []


@pytest.mark.parametrize(
    ("waiting", "superseded"), [((), [1, 2]), ((3,), [1]), ((2, 3), []), ((2,), [1, 2]), ((1, 2, 3), [])]
)
def test_carries_before_the_settled_are_superseded(waiting: tuple[int, ...], superseded: list[int]) -> None:
    choice = choose([carry(n, waits=n in waiting) for n in (1, 2, 3)], next_after(3), 0)

    assert choice.carry is not None and choice.carry.round == 3
    assert [row.round for row in choice.superseded] == superseded
    assert choice.void == ()
