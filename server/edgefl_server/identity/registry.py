"""Registry of devices and their keys: one SQLite file, which the server reads while `edgefl enroll` changes it.

::

    registry = Registry(Path("devices.sqlite"), "demo")
    registry.issue(new_token(server_key), "phone-7", valid_until=time.time() + 3600)
    registry.add("phone-7", key, source="request", now=time.time())
    registry.revoke("phone-7")
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.errors import ConfigError, StoreError
from edgefl.system.files import make_folder, make_private
from edgefl.wire.enrolment import Token
from edgefl.wire.keys import FOREVER, MOST_SUCCESSIONS

State = Literal["active", "retired", "revoked"]
Source = Literal["first-use", "token", "request", "rotation"]

_LAYOUT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys(
  federation TEXT NOT NULL, device TEXT NOT NULL, key BLOB NOT NULL, state TEXT NOT NULL, source TEXT NOT NULL,
  until INTEGER NOT NULL, added_at REAL NOT NULL, hello_at INTEGER NOT NULL DEFAULT 0,
  status_at INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(federation, device, key));
CREATE TABLE IF NOT EXISTS tokens(
  name TEXT PRIMARY KEY, federation TEXT NOT NULL, device TEXT NOT NULL, secret BLOB NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


_OF_ALL = (
    "SELECT device, key, state, source, until, added_at, hello_at, status_at FROM keys WHERE federation = ?"
)
_PRUNE = (
    # One that is over goes before one that is still good for a while, the older before the younger.
    "DELETE FROM keys WHERE rowid IN (SELECT rowid FROM keys WHERE federation = ? AND device = ? AND state = 'retired' "
    "ORDER BY until > ? DESC, added_at DESC, rowid DESC LIMIT -1 OFFSET ?)"
)
_MOST_READ = 100_000


class DeviceKey(msgspec.Struct, frozen=True, kw_only=True):
    """Public key of a device, as stored in the registry.

    Attributes:
        device: Name of the device.
        key: The public key.
        state: ``active``, ``retired`` (replaced, and valid until ``until``), or ``revoked``.
        source: Why the key is trusted.
        until: Epoch seconds until which the key is valid.
        added_at: Epoch seconds at which it was added.
        hello_at: Number of the last hello that it signed; a message with a smaller number is a replay.
        status_at: The same for the last status.
    """

    device: str
    key: bytes
    state: State
    source: Source
    until: int
    added_at: float
    hello_at: int = 0
    status_at: int = 0


class Registry:
    """Registry of the device keys of ``federation``, in the SQLite file ``path``, which is created if missing.

    Thread-safe; several processes may have the same file open.

    Raises:
        StoreError: If the file cannot be used.
    """

    def __init__(self, path: Path, federation: str) -> None:
        self.path = path
        self._federation = federation
        self._lock = threading.Lock()
        self._read: dict[str, list[DeviceKey]] = {}
        self._count: int | None = None
        self._version = 0
        make_folder(path.parent)
        # It holds the secrets of unused tokens.
        make_private(path)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            [(layout,)] = self._db.execute("PRAGMA user_version").fetchall()
            if layout not in (0, _LAYOUT):
                raise StoreError(
                    f"{path} has layout {layout}, this release reads {_LAYOUT}: install the edgefl that wrote it",
                    layout=layout,
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_LAYOUT}")
        except sqlite3.Error as error:
            raise StoreError(
                f"the list of devices {path} cannot be opened: {error}; name another file"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _using(self, *, durable: bool = False, changed: str = "") -> Iterator[sqlite3.Connection]:
        """Context of a transaction that may change the keys of the device ``changed``, whose cached keys are dropped.

        ``durable``: the transaction is on disk when the context ends.

        Raises:
            StoreError: If the database fails.
        """
        with self._reading() as db:
            self._read.pop(changed, None)
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            with db:
                yield db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Context in which this thread has the database to itself. It begins no transaction, because each received message
        leads to a read.

        Raises:
            StoreError: If the database fails.
        """
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise StoreError(f"the list of devices {self.path} cannot be used: {error}") from error

    # -- keys ------------------------------------------------------------------------------------------------

    def keys(self, device: str) -> list[DeviceKey]:
        """Return all stored keys of a device, the oldest first. The caller must not change the list, which is cached."""
        with self._reading() as db:
            self._look(db)
            if device not in self._read:
                self._read[device] = _rows(
                    db, f"{_OF_ALL} AND device = ? ORDER BY added_at, rowid", self._federation, device
                )
            return self._read[device]

    def devices(self) -> int:
        """Return the number of device names with keys."""
        with self._reading() as db:
            self._look(db)
            if self._count is None:
                count = "SELECT count(DISTINCT device) FROM keys WHERE federation = ?"
                [(self._count,)] = db.execute(count, (self._federation,)).fetchall()
            return int(self._count)

    def _look(self, db: sqlite3.Connection) -> None:
        """Drop all cached keys if another process changed the file, or if too many are cached."""
        [(version,)] = db.execute("PRAGMA data_version").fetchall()
        if version != self._version or len(self._read) > _MOST_READ:
            self._read, self._count, self._version = {}, None, version

    def all(self) -> list[DeviceKey]:
        """Return the keys of all devices, sorted by device, then the oldest first."""
        with self._using() as db:
            return _rows(db, f"{_OF_ALL} ORDER BY device, added_at, rowid", self._federation)

    def add(
        self, device: str, key: bytes, *, source: Source, now: float, until: int = 0, token: str = ""
    ) -> None:
        """Add an active key of a device. Its earlier active keys become ``retired`` and are valid until ``until``.

        Args:
            device: Name of the device.
            key: Public key.
            source: Why the key is trusted.
            now: Epoch seconds.
            until: Epoch seconds until which the earlier keys stay valid.
            token: Name of an enrolment token that is deleted; empty if none is used.

        Raises:
            ConfigError: If the key was revoked.
            StoreError: If the file cannot be written.
        """
        known = self.keys(device)
        if any(each.key == key and each.state == "revoked" for each in known):
            raise ConfigError(
                f"key {key.hex()[:12]} of device {device} was revoked: have the device make another one "
                "(`edgefl key rotate`, or an empty store)",
                device=device,
            )
        with self._using(durable=source != "first-use", changed=device) as db:
            if token:
                db.execute("DELETE FROM tokens WHERE name = ?", (token,))
            db.execute(
                "UPDATE keys SET state = 'retired', until = ? WHERE federation = ? AND device = ? AND state = 'active' "
                "AND key != ?",
                (until, self._federation, device, key),
            )
            db.execute(
                "INSERT INTO keys(federation, device, key, state, source, until, added_at) "
                "VALUES(?, ?, ?, 'active', ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET state = 'active', until = excluded.until",
                (self._federation, device, key, source, FOREVER, now),
            )
            db.execute(_PRUNE, (self._federation, device, now, MOST_SUCCESSIONS - 1))
        if self._count is not None and not known:
            self._count += 1

    def revoke(self, device: str) -> int:
        """Revoke all keys of a device, and return how many were not revoked before.

        Keys that a revoked key introduced by rotation are not accepted later either.
        """
        with self._using(durable=True, changed=device) as db:
            changed = db.execute(
                "UPDATE keys SET state = 'revoked', until = 0 WHERE federation = ? AND device = ? AND state != 'revoked'",
                (self._federation, device),
            )
            return changed.rowcount

    def forget(self, device: str) -> int:
        """Delete all keys of a device, including revoked ones, and return their number."""
        self._count = None
        with self._using(durable=True, changed=device) as db:
            gone = db.execute(
                "DELETE FROM keys WHERE federation = ? AND device = ?", (self._federation, device)
            )
            return gone.rowcount

    def store_numbers(self, device: str, key: bytes, *, hello_at: int = 0, status_at: int = 0) -> None:
        """Store the number of the last hello or status that a key signed, unless the stored one is higher. 0 changes
        nothing.
        """
        with self._using(changed=device) as db:
            db.execute(
                "UPDATE keys SET hello_at = max(hello_at, ?), status_at = max(status_at, ?) "
                "WHERE federation = ? AND device = ? AND key = ?",
                (hello_at, status_at, self._federation, device, key),
            )

    # -- tokens ----------------------------------------------------------------------------------------------

    def issue(self, token: Token, device: str, *, valid_until: float) -> None:
        """Store an enrolment token. Its owner may add one key of ``device``, once, until ``valid_until`` (epoch
        seconds).
        """
        with self._using(durable=True) as db:
            db.execute(
                "INSERT INTO tokens VALUES(?, ?, ?, ?, ?)",
                (token.name, self._federation, device, token.secret, valid_until),
            )

    def token(self, name: str, now: float) -> tuple[str, bytes] | None:
        """Return (device, secret) of the enrolment token ``name``; None if it is unknown, used, or expired at ``now``."""
        with self._using() as db:
            row = db.execute(
                "SELECT device, secret FROM tokens WHERE name = ? AND federation = ? AND until > ?",
                (name, self._federation, now),
            ).fetchone()
        return (str(row[0]), bytes(row[1])) if row else None

    def redeem(self, name: str, device: str, key: bytes, *, now: float) -> None:
        """Add ``key`` to ``device`` by the enrolment token ``name``, which is deleted. Does not check the token.

        Raises:
            ConfigError: If the key was revoked.
            StoreError: If the file cannot be written.
        """
        self.add(device, key, source="token", now=now, token=name)

    # -- numbers ---------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the stored number from which the server's own messages continue; 0 if there is none.

        (:class:`edgefl.wire.mqtt.envelope.MessageCounter`.)
        """
        with self._using() as db:
            row = db.execute("SELECT value FROM facts WHERE name = 'number'").fetchone()
        return int(row[0]) if row else 0

    def keep_number(self, number: int) -> None:
        """Store the number from which the server's own signed messages continue after a restart."""
        with self._using(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES('number', ?)", (str(number),))


def _rows(db: sqlite3.Connection, query: str, *values: str) -> list[DeviceKey]:
    names = DeviceKey.__struct_fields__
    return [
        msgspec.convert(dict(zip(names, row, strict=True)), DeviceKey)
        for row in db.execute(query, values).fetchall()
    ]
