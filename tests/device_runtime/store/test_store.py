"""The device's memory: bounded, durable, and never half-written."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from edgefl.errors import StoreError
from edgefl.wire.blobs import BlobRef, describe, split
from edgefl_device.store import database, file
from edgefl_device.store.carry_choice import StoredCarry
from edgefl_device.store.database import DECLINED, Outgoing, PastRound, Store
from tests.device_runtime.store.stores import carry_of, checkpoint, open_store, step_of

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
    assert store._all("SELECT * FROM checkpoint_tensors") == []


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
    store._db.execute(
        "CREATE TRIGGER fail BEFORE DELETE ON checkpoint BEGIN SELECT RAISE(ABORT, 'full'); END"
    )

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
        with pytest.raises(StoreError, match="belongs to device phone of federation demo"):
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
    monkeypatch.setattr(file, "_LOCK_PATIENCE_S", 0.05)


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
