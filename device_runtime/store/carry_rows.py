"""What programs carry from round to round, as rows of SQLite: one per update, with the round that left it.

A residual holds what an update did not tell. Had the server never heard of that update, the residual must not stand
either: so a new carry stands beside the one before, and is forgotten if its update is rejected or its round abandoned.
Which one a round goes on from, and which can go, is decided by :mod:`device_runtime.store.carry_choice` when it begins. A
device that trains on meanwhile goes on from the newest. The functions here run inside the store's transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

# No row is ever rewritten, which would hold it in memory. ``data`` is the last column, so that finding a row does not
# read it.
SCHEMA = """
CREATE TABLE IF NOT EXISTS carries(
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, nonce TEXT NOT NULL, round INTEGER NOT NULL, data BLOB NOT NULL);
"""


@dataclass(frozen=True)
class StoredCarry:
    """A carry in the store. ``name`` is "<run>/<program>/<tier>"; ``waits``: the server has not spoken on its update."""

    id: int
    name: str
    nonce: str
    round: int
    waits: bool


def add(db: sqlite3.Connection, name: str, nonce: str, number: int, data: bytes) -> None:
    """Keep the carry that round ``number`` computed for the task ``nonce``, beside those before."""
    row = (name, nonce, number, data)
    db.execute("INSERT INTO carries(name, nonce, round, data) VALUES(?, ?, ?, ?)", row)


def all_of(db: sqlite3.Connection) -> list[StoredCarry]:
    """Every carry, oldest first."""
    rows = db.execute(
        "SELECT id, name, nonce, round, EXISTS(SELECT 1 FROM outbox WHERE outbox.nonce = carries.nonce) "
        "FROM carries ORDER BY id"
    )
    return [StoredCarry(key, name, nonce, number, bool(waits)) for key, name, nonce, number, waits in rows]


def read(db: sqlite3.Connection, key: int) -> bytes | None:
    """The bytes of a carry; None if its update was rejected meanwhile."""
    row = db.execute("SELECT data FROM carries WHERE id = ?", (key,)).fetchone()
    return row[0] if row else None


def drop(db: sqlite3.Connection, keys: Iterable[int]) -> None:
    db.executemany("DELETE FROM carries WHERE id = ?", [(key,) for key in keys])


def reject(db: sqlite3.Connection, nonce: str) -> None:
    """The server refused the update of ``nonce``: its carry goes, and the one before stands."""
    db.execute("DELETE FROM carries WHERE nonce = ?", (nonce,))
