"""Store of the clients' carries, the state that an algorithm keeps on a client between its rounds. One row per carry, as
in a device's own store.

Changes become durable by :meth:`CarryStore.commit`, so a killed process leaves the last committed state.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from edgefl.errors import StoreError
from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays
from edgefl_device.round.carry import RoundToBegin, choose
from edgefl_device.store.database import StoredCarry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS standing(only INTEGER PRIMARY KEY CHECK (only = 1), data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS carries(
  id INTEGER PRIMARY KEY, client TEXT NOT NULL, name TEXT NOT NULL, nonce TEXT NOT NULL, round INTEGER NOT NULL,
  data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_client ON carries(client);
"""


class CarryStore:
    """Carries of all clients, and the state of the simulation, in the SQLite file ``path`` (``state.sqlite``).

    A carry is the state that an algorithm keeps on a client from one of its rounds to the next, such as a residual.
    The file is created if it is missing.

    Raises:
        StoreError: If the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        try:
            self._db.executescript(_SCHEMA)
            self._db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StoreError(
                f"{path} cannot be read ({error}): restore it, use `fresh`, or another `out`", path=str(path)
            ) from error

    @property
    def standing(self) -> bytes | None:
        """Encoded state of the simulation as of the last :meth:`commit`, or None before the first one."""
        row = self._db.execute("SELECT data FROM standing").fetchone()
        return None if row is None else bytes(row[0])

    def commit(self, standing: bytes) -> None:
        """Write all changes since the last call durably to disk, together with ``standing``, the encoded state of the
        simulation.
        """
        self._db.execute("INSERT OR REPLACE INTO standing(only, data) VALUES(1, ?)", (standing,))
        self._db.commit()

    def choose(self, client: str, begun: RoundToBegin, exchanges: int) -> int | None:
        """Return the row number of a client's newest valid carry, the state that the algorithm keeps on it between rounds.

        Return None if there is none. Carries that no later round can use are deleted.

        Args:
            client: Name of the client.
            begun: Round that the client begins. Only carries stored under ``begun.name`` are valid.
            exchanges: Number of completed rounds for which a carry is valid; 0 for no limit.
        """
        rows = self._db.execute(
            "SELECT id, name, nonce, round FROM carries WHERE client = ? ORDER BY id", (client,)
        )
        stored = [StoredCarry(key, name, nonce, number, waits=False) for key, name, nonce, number in rows]
        choice = choose(stored, begun, exchanges)
        useless = [*(void.carry for void in choice.void), *choice.superseded]
        self._db.executemany("DELETE FROM carries WHERE id = ?", [(each.id,) for each in useless])
        return None if choice.carry is None else choice.carry.id

    def read(self, number: int) -> Arrays:
        """Return the arrays of a client's carry (state that the algorithm keeps on it) by name.

        ``number``: row of the carry, from :meth:`choose`. The carry stays in the store.
        """
        row = self._db.execute("SELECT data FROM carries WHERE id = ?", (number,)).fetchone()
        return tensors.load(row[0])

    def keep(self, client: str, begun: RoundToBegin, nonce: str, carry: Arrays) -> None:
        """Store a client's new carry, the state that the algorithm keeps on it between rounds.

        Args:
            client: Name of the client.
            begun: Round in which the client made the carry.
            nonce: Identifier of the client's task.
            carry: Arrays by name.
        """
        self._db.execute(
            "INSERT INTO carries(client, name, nonce, round, data) VALUES(?, ?, ?, ?, ?)",
            (client, begun.name, nonce, begun.round, tensors.dump(carry)),
        )

    def close(self) -> None:
        """Close the file. Changes that were not committed are lost."""
        self._db.close()
