"""Large values of the store, written in pieces: a bound value would be copied twice, and stay with its statement."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from edgefl.wire.tensors import Piece


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
