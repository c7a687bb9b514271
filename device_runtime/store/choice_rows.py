"""Which form of a graph runs fastest on this device, as rows of SQLite: found once, read in every round.

The functions here run inside the store's transactions.
"""

from __future__ import annotations

import sqlite3

SCHEMA = """
CREATE TABLE IF NOT EXISTS choices(
  id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, data BLOB NOT NULL);
"""

MOST = 256
"""Choices that are kept, the newest."""


def find(db: sqlite3.Connection, key: str) -> bytes | None:
    row = db.execute("SELECT data FROM choices WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def keep(db: sqlite3.Connection, key: str, data: bytes) -> None:
    db.execute("DELETE FROM choices WHERE key = ?", (key,))
    db.execute("INSERT INTO choices(key, data) VALUES(?, ?)", (key, data))
    db.execute(
        "DELETE FROM choices WHERE id NOT IN (SELECT id FROM choices ORDER BY id DESC LIMIT ?)", (MOST,)
    )
