"""The device's store: one SQLite file with blobs, the open job, its checkpoint, the outbox, carries and history.

It contains everything that a killed agent needs to resume. Each method is one transaction.
"""

from __future__ import annotations

import io
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.errors import StoreError
from edgefl.system.files import FolderHeld, FolderLock, make_folder, make_private
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import MALFORMED, with_last_bytes
from edgefl.wire.mqtt.topics import NO_SHARD
from edgefl.wire.tensors import Array, Piece

FILE = "store.sqlite3"
"""In the folder of a device."""

_LOCK_PATIENCE_S = 5.0

_CACHE_KIB = 256
"""What SQLite keeps of the file in memory for good, once it wrote that much; its own choice of 2 MiB is no faster."""

_LAYOUT = 3
"""Of the tables, in SQLite's ``user_version``, which is 0 in a new file. Below it lie those of before the first release."""

_OWNER = """
CREATE TABLE IF NOT EXISTS owner(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreFile:
    """SQLite database in ``folder`` with the tables of ``schema``. Thread-safe; one process at a time.

    Raises:
        StoreError: The database belongs to another device or federation, is in use by another process, or is damaged.
    """

    def __init__(self, folder: Path, schema: str, *, federation: str, device: str) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        try:
            make_folder(folder, private=True)
            with suppress(OSError):  # one that an earlier release made, or that is somebody else's
                folder.chmod(0o700)
            self._folder_lock = _lock_folder(folder)
        except OSError as error:
            raise StoreError(f"the folder {folder} is unusable ({error}): name another one") from error
        try:
            self._open(schema)
            self._claim({"federation": federation, "device": device})
        except StoreError:
            self._unlock()
            raise

    def _open(self, schema: str) -> None:
        try:
            path = self.folder / FILE
            make_private(path)
            # A cached statement keeps the values bound to it, such as the last update, until it runs again.
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30, cached_statements=0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            self._check_layout(path)
            self._db.executescript(_OWNER + schema)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.folder / FILE} cannot be opened: {error}; {_remedy(error)}") from error

    def _check_layout(self, path: Path) -> None:
        """Raise StoreError if another release wrote the file with another layout."""
        [(layout,)] = self._db.execute("PRAGMA user_version").fetchall()
        new = not self._db.execute("SELECT 1 FROM sqlite_master").fetchall()
        if layout != _LAYOUT and not (new and layout == 0):
            self._db.close()
            raise StoreError(
                f"{path} has layout {layout}, this runtime reads {_LAYOUT}: install the edgefl that wrote it, or move the "
                "file away to start afresh",
                layout=layout,
            )
        self._db.execute(f"PRAGMA user_version={_LAYOUT}")

    def _claim(self, claim: dict[str, str]) -> None:
        """Store the owner of the store, ``device`` and ``federation`` in ``claim``. StoreError if it has another owner."""
        owner: dict[str, str] = dict(self._all("SELECT name, value FROM owner"))
        if any(value and owner.get(name, value) != value for name, value in claim.items()):
            self._db.close()
            raise StoreError(
                f"the store in {self.folder} belongs to device {owner.get('device')} of federation "
                f"{owner.get('federation')}, not to {claim['device']} of {claim['federation']}: use another folder",
                **owner,
            )
        with self._transaction() as db:
            rows = [(name, value) for name, value in claim.items() if value]
            db.executemany("INSERT OR IGNORE INTO owner VALUES(?, ?)", rows)

    def close(self) -> None:
        with self._lock:
            self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        self._folder_lock.release()

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which ends with the ``with`` block; an exception rolls it back. StoreError if SQLite
        fails.

        ``durable`` waits for the disk, so that the changes survive a power failure.
        """
        with self._lock:
            if durable:
                self._db.execute("PRAGMA synchronous=FULL")
            try:
                with self._db:
                    yield self._db
            except sqlite3.Error as error:
                raise StoreError(
                    f"the store in {self.folder} cannot be written: {error}; {_remedy(error)}"
                ) from error
            finally:
                if durable:
                    self._db.execute("PRAGMA synchronous=NORMAL")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._db
        except sqlite3.Error as error:
            raise StoreError(
                f"the store in {self.folder} cannot be read: {error}; move it away to start afresh"
            ) from error

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._reading() as db:
            return db.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> bytes | None:
        rows = self._all(query, *values)
        return as_bytes(rows[0][0]) if rows else None


def _remedy(error: Exception) -> str:
    """Return advice for an error: free space for a full disk, else move a damaged file away."""
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return "free some space there, or give the device a folder on another disk by `store`"
    return "move it away to start afresh if it is damaged"


def _lock_folder(folder: Path) -> FolderLock:
    """Lock the folder, waiting a short time for an agent that is stopping. StoreError if it stays locked."""
    try:
        return FolderLock(folder, patience_s=_LOCK_PATIENCE_S)
    except FolderHeld as held:
        raise StoreError(
            f"a device already runs on this store ({folder}, {held.who}): stop it, or give this one another folder "
            "by `store`, or a name of its own",
            pid=held.pid,
        ) from held


def as_bytes(value: object) -> bytes:
    """Return a value of SQLite, text or blob, as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]


def facts_in(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read facts (small named values) of another agent's store without locking it.

    Args:
        folder: Folder of the store.
        names: Names of the facts.

    Returns:
        The values of those facts that exist, by name; {} if there is no store.

    Raises:
        StoreError: The store cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    marks = ", ".join("?" * len(names))
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            rows = db.execute(f"SELECT name, value FROM facts WHERE name IN ({marks})", names)
            return {str(name): bytes(value) for name, value in rows}
    except sqlite3.Error as error:
        raise StoreError(
            f"the device's store {path} cannot be read: {error}; let this user read it and write in its folder, or name the "
            "server's key by `server_key`"
        ) from error


def insert(db: sqlite3.Connection, table: str, row: Mapping[str, object], data: Sequence[Piece]) -> None:
    """Insert ``row`` and the column ``data``, whose pieces are written one after the other.

    ``data`` must be the table's last column: only then SQLite does not build a row with its zeros in memory.
    """
    marks = ", ".join("?" * len(row))
    made = db.execute(
        f"INSERT INTO {table}({', '.join(row)}, data) VALUES({marks}, zeroblob(?))",
        (*row.values(), sum(map(len, data))),
    )
    if made.lastrowid is None or not any(map(len, data)):
        return
    with db.blobopen(table, "data", made.lastrowid) as blob:
        for piece in data:
            blob.write(piece)


# The ids are never used again: what was replaced is missing to who still reads it, and never mixed with the new.
_CHECKPOINT_SCHEMA = """
CREATE TABLE IF NOT EXISTS checkpoint(
  nonce TEXT PRIMARY KEY, step INTEGER NOT NULL, sums BLOB NOT NULL, basis TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoint_tensors(
  id INTEGER PRIMARY KEY AUTOINCREMENT, nonce TEXT NOT NULL REFERENCES checkpoint ON DELETE CASCADE,
  name TEXT NOT NULL, dtype TEXT NOT NULL, shape BLOB NOT NULL, data BLOB NOT NULL);
"""

_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """Training state after ``step`` local steps.

    Attributes:
        step: Number of steps made.
        sums: Running sums of metrics.
        tensors: Names and arrays of the state. They are produced one at a time and can be iterated once.
        basis: Text that identifies what the training began with besides the task, such as its carry.
    """

    step: int
    sums: dict[str, float]
    tensors: Iterable[tuple[str, Array]]
    basis: str = ""


@dataclass(frozen=True)
class StoredCarry:
    """Entry of a carry (state that an algorithm stores on the device from round to round) in the store, without its
    data.

    Attributes:
        id: Number of the entry; later entries have larger numbers.
        name: ``<run>/<algorithm>/<tier>``.
        nonce: Identifier of the task that computed it.
        round: Number of the round that computed it.
        waits: True if the update of that task is not acknowledged yet.
    """

    id: int
    name: str
    nonce: str
    round: int
    waits: bool


# In tables of large values ``data`` is the last column, so that finding a row does not read it. No row of ``carries`` is
# ever rewritten, which would hold it in memory.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs(sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, used_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS chunks(
  sha256 TEXT NOT NULL REFERENCES blobs ON DELETE CASCADE, idx INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY(sha256, idx));
CREATE TABLE IF NOT EXISTS job(one INTEGER PRIMARY KEY CHECK(one = 1), data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outbox(nonce TEXT PRIMARY KEY, round INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS traffic(day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS history(nonce TEXT PRIMARY KEY, finished_at REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS carries(
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, nonce TEXT NOT NULL, round INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS choices(
  id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, data BLOB NOT NULL);
"""


_MOST_CHOICES = 256
"""Results of trials that are kept, the newest."""

_MOST_NAMES = 500
"""Blobs that are asked for in one query: old versions of SQLite take 999 values."""

DECLINED = "declined"
"""The outcome of a task that this device did not take."""


ChunkRef = tuple[BlobRef, int]
"""A chunk of a blob, by its index."""


class Outgoing(msgspec.Struct, frozen=True):
    """Update in the outbox.

    Attributes:
        run: Name of the run.
        round: Number of the round.
        nonce: Nonce of the task.
        data: The encoded Update.
        ask: True if the update is offered first, and its chunks are sent on request.
        shard: Number of the aggregation worker whose topics it is published on.
    """

    run: str
    round: int
    nonce: str
    data: memoryview = memoryview(b"")
    ask: bool = False
    shard: int = NO_SHARD


class PastRound(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the device's history: the outcome of one task.

    Attributes:
        run: Name of the run.
        round: Number of the round.
        tier: Tier of the task.
        nonce: Identifier of the task.
        outcome: Status in the server's acknowledgement, such as ``accepted``, or that the device declined.
        reason: Code of the reason if it was not accepted.
        loss: Mean training loss; NaN if unknown.
        step_ms: Median time of a step in milliseconds.
        peak_bytes: Peak of anonymous memory.
        down_bytes: Bytes received.
        up_bytes: Bytes of the update.
        text: Details of a decline, for the device's owner only.
    """

    run: str
    round: int
    tier: str
    nonce: str
    outcome: str
    reason: str = ""
    loss: float = float("nan")
    step_ms: float = 0.0
    peak_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    text: str = ""


class Store(StoreFile):
    """Persistent state of one agent. Thread-safe.

    It belongs to the device and federation that first opened it, and to one process at a time.
    """

    def __init__(
        self, folder: Path, *, limit_bytes: int, history_rounds: int, federation: str = "", device: str = ""
    ) -> None:
        self._limit = limit_bytes
        self._history_rounds = history_rounds
        super().__init__(folder, _SCHEMA + _CHECKPOINT_SCHEMA, federation=federation, device=device)

    # -- blobs -----------------------------------------------------------------------------------------------

    def missing(self, refs: Sequence[BlobRef]) -> list[ChunkRef]:
        """Return the chunks of ``refs`` that are not stored, in order. An empty blob has no chunk to store."""
        here: dict[str, set[int]] = {ref.sha256: set() for ref in refs}
        names = list(here)
        for first in range(0, len(names), _MOST_NAMES):
            some = names[first : first + _MOST_NAMES]
            marks = ", ".join("?" * len(some))
            query = f"SELECT sha256, idx FROM chunks WHERE sha256 IN ({marks})"
            for sha256, index in self._all(query, *some):
                here[sha256].add(index)
        return [
            (ref, index)
            for ref in refs
            if ref.size
            for index in range(ref.count)
            if index not in here[ref.sha256]
        ]

    def missing_chunks(self, ref: BlobRef) -> list[int]:
        """Return the indices of the chunks of ``ref`` that are not stored yet."""
        return [index for _, index in self.missing([ref])]

    def put_chunk(self, ref: BlobRef, index: int, data: bytes) -> None:
        """Store one verified chunk."""
        self.put_chunks([((ref, index), data)])

    def put_chunks(self, chunks: Sequence[tuple[ChunkRef, bytes]]) -> None:
        """Store verified chunks, all or none."""
        now = time.time()
        with self._transaction() as db:
            blobs = [(ref.sha256, ref.size, now) for (ref, _), _ in chunks]
            db.executemany("INSERT OR IGNORE INTO blobs VALUES(?, ?, ?)", blobs)
            rows = [(ref.sha256, index, data) for (ref, index), data in chunks]
            db.executemany("INSERT OR REPLACE INTO chunks VALUES(?, ?, ?)", rows)

    def make_room(self, needed: list[BlobRef]) -> None:
        """Drop the least recently used blobs until ``needed`` fit into the limit.

        Raises:
            StoreError: The blobs in ``needed`` alone exceed the limit.
        """
        keep = {ref.sha256: ref.size for ref in needed}
        if sum(keep.values()) > self._limit:
            raise StoreError(
                f"this round needs {sum(keep.values())} bytes of blobs, the store may hold {self._limit}: "
                "raise limits.store_bytes or ask for a smaller tier",
                needed=sum(keep.values()),
                limit=self._limit,
            )
        with self._transaction() as db:
            self._drop_oldest(db, sum(keep.values()) + self._beside_bytes(), keep)
            _touch(db, keep)

    def touch(self, refs: Sequence[BlobRef]) -> None:
        """Mark blobs as recently used, so that others are dropped first."""
        with self._transaction() as db:
            _touch(db, [ref.sha256 for ref in refs])

    def make_room_beside(self, nbytes: int) -> None:
        """Drop the least recently used blobs until a file of ``nbytes`` in the store's folder fits into the limit.

        Raises:
            StoreError: The file and the other files of rounds in the folder exceed the limit.
        """
        beside = self._beside_bytes() + nbytes
        if beside > self._limit:
            raise StoreError(
                f"this round keeps {beside} bytes on the disk, the store may hold {self._limit}: raise limits.store_bytes "
                "or ask for a smaller tier",
                needed=beside,
                limit=self._limit,
            )
        with self._transaction() as db:
            self._drop_oldest(db, beside, ())

    def _drop_oldest(self, db: sqlite3.Connection, nbytes: int, keep: Collection[str]) -> None:
        """Drop the least recently used blobs, except those in ``keep``, until the others and ``nbytes`` fit into the
        limit.
        """
        rows = db.execute("SELECT sha256, size FROM blobs ORDER BY used_at").fetchall()
        others = [(sha256, size) for sha256, size in rows if sha256 not in keep]
        used = nbytes + sum(size for _, size in others)
        for sha256, size in others:
            if used <= self._limit:
                return
            db.execute("DELETE FROM blobs WHERE sha256 = ?", (sha256,))
            used -= size

    def _beside_bytes(self) -> int:
        """Return the bytes of other files in the folder that count: stored activations, and bundles that are being
        measured.
        """
        files = [*self.folder.glob("record-*"), *self.folder.glob("profile/**/*")]
        sizes = 0
        for file in files:
            with suppress(OSError):  # it is gone
                sizes += file.stat().st_size if file.is_file() else 0
        return sizes

    def add_traffic(self, day: str, nbytes: int) -> None:
        """Add ``nbytes`` to the traffic of ``day``, and delete the counts of other days."""
        with self._transaction() as db:
            db.execute("DELETE FROM traffic WHERE day != ?", (day,))
            db.execute(
                "INSERT INTO traffic VALUES(?, ?) ON CONFLICT(day) DO UPDATE SET bytes = bytes + excluded.bytes",
                (day, nbytes),
            )

    def traffic(self, day: str) -> int:
        """Return the bytes sent and received on ``day``."""
        rows = self._all("SELECT bytes FROM traffic WHERE day = ?", day)
        return int(rows[0][0]) if rows else 0

    def blob(self, ref: BlobRef) -> bytes:
        """Return the stored bytes of a blob, unverified; fewer than ``ref.size`` if chunks are missing."""
        whole = io.BytesIO()  # one chunk after the other, in memory once
        with self._reading() as db:
            for (data,) in db.execute("SELECT data FROM chunks WHERE sha256 = ? ORDER BY idx", (ref.sha256,)):
                whole.write(data)
        return whole.getvalue()

    def drop_blob(self, ref: BlobRef) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM blobs WHERE sha256 = ?", (ref.sha256,))

    # -- the open round --------------------------------------------------------------------------------------

    def open_job(self, data: bytes, *, fresh: bool = False) -> None:
        """Store the encoded job as the current one, before work on it begins. ``fresh`` also deletes the checkpoint."""
        with self._transaction() as db:
            if fresh:
                db.execute("DELETE FROM checkpoint")
            db.execute("INSERT OR REPLACE INTO job VALUES(1, ?)", (data,))

    def job(self) -> bytes | None:
        return self._one("SELECT data FROM job")

    def close_job(self) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM job")
            db.execute("DELETE FROM checkpoint")

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint atomically. Its tensors are produced and written one after the other."""
        with self._transaction() as db:
            db.execute("DELETE FROM checkpoint")
            db.execute(
                "INSERT INTO checkpoint VALUES(?, ?, ?, ?)",
                (nonce, checkpoint.step, msgspec.msgpack.encode(checkpoint.sums), checkpoint.basis),
            )
            for name, array in checkpoint.tensors:
                shape = msgspec.msgpack.encode(array.shape)
                row = {"nonce": nonce, "name": name, "dtype": array.dtype.str, "shape": shape}
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                insert(db, "checkpoint_tensors", row, [data])
                del array, data  # or they would live on while the next one is made

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        """Return the checkpoint of the task ``nonce``; None if none is stored.

        Its tensors are read during iteration, which raises StoreError if the checkpoint was replaced meanwhile.
        """
        heads = self._all("SELECT step, sums, basis FROM checkpoint WHERE nonce = ?", nonce)
        if not heads:
            return None
        [(step, sums, basis)] = heads
        query = "SELECT id, name, dtype, shape FROM checkpoint_tensors WHERE nonce = ? ORDER BY id"
        rows = self._all(query, nonce)
        tensors = ((name, self._tensor(key, dtype, shape)) for key, name, dtype, shape in rows)
        return Checkpoint(step, msgspec.msgpack.decode(sums, type=dict[str, float]), tensors, basis)

    def _tensor(self, key: int, dtype: str, shape: bytes) -> Array:
        array = np.empty(msgspec.msgpack.decode(shape, type=tuple[int, ...]), dtype)
        view = array.reshape(-1).view(np.uint8)
        with self._reading() as db, db.blobopen("checkpoint_tensors", "data", key, readonly=True) as blob:
            for start in range(0, array.nbytes, _PIECE_BYTES):
                piece = blob.read(_PIECE_BYTES)
                view[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        return array

    # -- outbox ----------------------------------------------------------------------------------------------

    def finish_job(
        self,
        outgoing: Outgoing,
        carry: bytes | Sequence[Piece] | None,
        carry_name: str,
        data: Sequence[Piece] = (),
    ) -> None:
        """Move a computed update into the outbox, store the carry (state for later rounds) and end its job, in one
        durable transaction.

        Args:
            outgoing: The update.
            carry: Encoded carry, also in pieces; None if the round has none.
            carry_name: ``<run>/<algorithm>/<tier>``.
            data: The encoded update in pieces, which replaces ``outgoing.data`` and is never joined in memory.
        """
        body = data or [outgoing.data]
        fields = {key: value for key, value in msgspec.structs.asdict(outgoing).items() if key != "data"}
        head = with_last_bytes(msgspec.msgpack.encode({**fields, "data": b""}), sum(map(len, body)))
        with self._transaction(durable=True) as db:
            db.execute("DELETE FROM outbox WHERE nonce = ?", (outgoing.nonce,))
            insert(db, "outbox", {"nonce": outgoing.nonce, "round": outgoing.round}, [head, *body])
            if carry is not None:
                # Besides earlier ones: if the server never gets the update, its carry must not count either.
                kept = {"name": carry_name, "nonce": outgoing.nonce, "round": outgoing.round}
                insert(db, "carries", kept, [carry] if isinstance(carry, bytes) else carry)
            db.execute("DELETE FROM job")
            db.execute("DELETE FROM checkpoint")

    def outgoing(self) -> Outgoing | None:
        """Return the oldest update in the outbox; None if the outbox is empty.

        Raises:
            StoreError: The update cannot be decoded. It is deleted from the outbox, so that the next call continues.
        """
        rows = self._all("SELECT rowid FROM outbox ORDER BY rowid LIMIT 1")
        if not rows:
            return None
        [(row,)] = rows
        with self._reading() as db, db.blobopen("outbox", "data", row, readonly=True) as blob:
            data = blob.read()  # a selected value would be copied twice
        try:
            return msgspec.msgpack.decode(data, type=Outgoing)
        except MALFORMED as error:
            with self._transaction() as db:
                db.execute("DELETE FROM outbox WHERE rowid = ?", (row,))
            raise StoreError(
                f"an update that waited in the store in {self.folder} cannot be read ({error}) and is dropped: the disk may "
                "be damaged, or another release wrote it"
            ) from error

    def any_waits(self) -> bool:
        """Return True if the outbox holds an update. Does not load it."""
        return bool(self._all("SELECT rowid FROM outbox LIMIT 1"))

    def waits(self, nonce: str) -> bool:
        """Return True if the outbox holds the update of this task."""
        return self._one("SELECT nonce FROM outbox WHERE nonce = ?", nonce) is not None

    def settle(self, past: PastRound) -> None:
        """Move an acknowledged update from the outbox to the history, in one transaction.

        If the server did not accept it, the state that its round left for later rounds is deleted too.
        """
        with self._transaction() as db:
            if past.outcome != "accepted":
                db.execute("DELETE FROM carries WHERE nonce = ?", (past.nonce,))
            db.execute("DELETE FROM outbox WHERE nonce = ?", (past.nonce,))
            self._remember(db, past)

    def decline(self, past: PastRound) -> None:
        """Move the open job to the history as declined, in one durable transaction, and delete its checkpoint."""
        with self._transaction(durable=True) as db:
            self._remember(db, past)
            db.execute("DELETE FROM job")
            db.execute("DELETE FROM checkpoint")

    def _remember(self, db: sqlite3.Connection, past: PastRound) -> None:
        row = (past.nonce, time.time(), msgspec.msgpack.encode(past))
        db.execute("INSERT OR REPLACE INTO history VALUES(?, ?, ?)", row)
        db.execute(
            # By the order in which they came: a clock may have been a day ahead.
            "DELETE FROM history WHERE rowid NOT IN (SELECT rowid FROM history ORDER BY rowid DESC LIMIT ?)",
            (self._history_rounds,),
        )

    # -- facts -----------------------------------------------------------------------------------------------

    def fact(self, name: str) -> bytes | None:
        """Return the stored value of the fact (a small named value, such as the trusted keys) ``name``; None if there
        is none.
        """
        return self._one("SELECT value FROM facts WHERE name = ?", name)

    def keep_fact(self, name: str, value: bytes, *, durable: bool = True) -> None:
        """Replace the value of the fact (a small named value) ``name``.

        ``durable``: wait for the disk. False leaves it to the next durable transaction, such as the end of a round.
        """
        with self._transaction(durable=durable) as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES(?, ?)", (name, value))

    # -- which forms of graphs run fastest here --------------------------------------------------------------

    def choice(self, key: str) -> bytes | None:
        """Return the encoded tuning result under ``key``; None if none is stored."""
        return self._one("SELECT data FROM choices WHERE key = ?", key)

    def keep_choice(self, key: str, data: bytes) -> None:
        """Replace the encoded tuning result under ``key``, and delete the oldest results beyond a limit."""
        with self._transaction() as db:
            db.execute("DELETE FROM choices WHERE key = ?", (key,))
            db.execute("INSERT INTO choices(key, data) VALUES(?, ?)", (key, data))
            old = "SELECT id FROM choices ORDER BY id DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM choices WHERE id IN ({old})", (_MOST_CHOICES,))

    def drop_choice(self, key: str) -> None:
        """Delete the tuning result under ``key``."""
        with self._transaction() as db:
            db.execute("DELETE FROM choices WHERE key = ?", (key,))

    # -- what is carried from round to round -----------------------------------------------------------------

    def carries(self) -> list[StoredCarry]:
        """Return the entries of all carries (state for later rounds), of any run, algorithm and tier, oldest first."""
        waits = "EXISTS(SELECT 1 FROM outbox WHERE outbox.nonce = carries.nonce)"
        rows = self._all(f"SELECT id, name, nonce, round, {waits} FROM carries ORDER BY id")
        return [
            StoredCarry(key, name, nonce, number, bool(waits)) for key, name, nonce, number, waits in rows
        ]

    def carry(self, carry: StoredCarry) -> bytes | None:
        """Return the bytes of a carry (state for later rounds); None if it was deleted because its update was rejected."""
        return self._one("SELECT data FROM carries WHERE id = ?", carry.id)

    def drop_carries(self, carries: Iterable[StoredCarry]) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM carries WHERE id = ?", [(carry.id,) for carry in carries])

    # -- history ---------------------------------------------------------------------------------------------

    def history(self) -> list[PastRound]:
        """Return past rounds, oldest first."""
        rows = self._all("SELECT data FROM history ORDER BY rowid")
        return [msgspec.msgpack.decode(row[0], type=PastRound) for row in rows]

    def past(self, nonce: str) -> PastRound | None:
        data = self._one("SELECT data FROM history WHERE nonce = ?", nonce)
        return msgspec.msgpack.decode(data, type=PastRound) if data else None

    def declined(self, run: str, number: int) -> list[PastRound]:
        """Return the history entries of the declined tasks of one round."""
        return [
            past
            for past in self.history()
            if past.outcome == DECLINED and (past.run, past.round) == (run, number)
        ]


def _touch(db: sqlite3.Connection, names: Iterable[str]) -> None:
    now = time.time()
    db.executemany("UPDATE blobs SET used_at = ? WHERE sha256 = ?", [(now, name) for name in names])
