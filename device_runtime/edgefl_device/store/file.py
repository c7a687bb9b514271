"""The file of a device's store: an SQLite database of one device and federation, and of one process at a time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from edgefl.errors import StoreError
from edgefl.system.files import FolderHeld, FolderLock, make_folder, make_private
from edgefl.wire.tensors import Piece

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
    """The database in ``folder`` with the tables of ``schema``, and its transactions. Thread-safe.

    StoreError if it is somebody else's than ``federation``'s and ``device``'s, is in use, or cannot be used.
    """

    def __init__(self, folder: Path, schema: str, *, federation: str, device: str) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        try:
            make_folder(folder, private=True)
            with suppress(OSError):  # one that an earlier release made, or that is somebody else's
                folder.chmod(0o700)
            self._folder_lock = _locked(folder)
        except OSError as error:
            raise StoreError(f"the folder {folder} is unusable ({error}): name another one") from error
        try:
            self._open(schema)
            self._own({"federation": federation, "device": device})
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
        """Raise StoreError if another release wrote the file in another layout."""
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

    def _own(self, claim: dict[str, str]) -> None:
        """Store the owner; StoreError if there is another one."""
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
        """Open a transaction; ``durable`` waits for the disk, so that it survives a power cut too."""
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
    """Return what to do: a full disk damages no store, and room does not repair a damaged one."""
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return "free some space there, or give the device a folder on another disk by `store`"
    return "move it away to start afresh if it is damaged"


def _locked(folder: Path) -> FolderLock:
    """Lock the folder. Waits a little: an agent that is being stopped may still finish its step."""
    try:
        return FolderLock(folder, patience_s=_LOCK_PATIENCE_S)
    except FolderHeld as held:
        raise StoreError(
            f"a device already runs on this store ({folder}, {held.who}): stop it, or give this one another folder "
            "by `store`, or a name of its own",
            pid=held.pid,
        ) from held


def as_bytes(value: object) -> bytes:
    """Return a blob of SQLite as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]


def facts_in(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the facts ``names`` of the store in ``folder``, {} if there is no store. StoreError if it cannot be read."""
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
    """Insert ``row`` with the pieces of its column ``data``, one after the other.

    ``data`` is the last column: SQLite builds a row with its zeros in memory unless they come at its end.
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
