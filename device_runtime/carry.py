"""What programs carry from round to round, as rows of SQLite: one per update that the server has not spoken on yet.

A residual holds what an update did not tell. Had the server never heard of that update, the residual must not stand
either: so a new carry replaces the one before only once its update is accepted, and is forgotten if it is rejected.
A device that trains on meanwhile goes on from the newest. The functions here run inside the store's transactions.
"""

from __future__ import annotations

import sqlite3

# No row is ever rewritten, which would hold it in memory: the newest of a name counts, and older ones are deleted.
# ``data`` is the last column, so that finding a row does not read it.
SCHEMA = """
CREATE TABLE IF NOT EXISTS carries(
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, nonce TEXT NOT NULL, data BLOB NOT NULL);
"""


def adopt_former(db: sqlite3.Connection) -> None:
    """Take over what a release before wrote to the table ``carry``, one row per name. To run in one transaction."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'carry'").fetchone():
        db.execute("INSERT INTO carries(name, nonce, data) SELECT name, '', data FROM carry")
        db.execute("DROP TABLE carry")


def add(db: sqlite3.Connection, name: str, nonce: str, data: bytes) -> None:
    """Keep the carry that the round of ``nonce`` computed, beside the one before."""
    db.execute("INSERT INTO carries(name, nonce, data) VALUES(?, ?, ?)", (name, nonce, data))


def newest(db: sqlite3.Connection, name: str) -> bytes | None:
    row = db.execute("SELECT data FROM carries WHERE name = ? ORDER BY id DESC LIMIT 1", (name,)).fetchone()
    return row[0] if row else None


def settle(db: sqlite3.Connection, nonce: str, *, accepted: bool) -> None:
    """The server's word on the update of ``nonce``: forget the carries before its own, or that one."""
    if accepted:
        db.execute(
            "DELETE FROM carries AS old WHERE EXISTS(SELECT 1 FROM carries AS own "
            "WHERE own.nonce = ? AND own.name = old.name AND own.id > old.id)",
            (nonce,),
        )
    else:
        db.execute("DELETE FROM carries WHERE nonce = ?", (nonce,))
