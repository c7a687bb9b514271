"""Training state between two processes, as rows of SQLite: one per tensor, so that one tensor is copied at a time.

A device's memory peaks where its training state is saved, if the state is copied whole. The functions here run inside
the store's transactions and let SQLite's errors pass.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from edgefl.wire.tensors import Array
from edgefl_device.store.file import insert

# The ids are never used again: what was replaced is missing to who still reads it, and never mixed with the new.
SCHEMA = """
CREATE TABLE IF NOT EXISTS checkpoint(
  nonce TEXT PRIMARY KEY, step INTEGER NOT NULL, sums BLOB NOT NULL, basis TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoint_tensors(
  id INTEGER PRIMARY KEY AUTOINCREMENT, nonce TEXT NOT NULL REFERENCES checkpoint ON DELETE CASCADE,
  name TEXT NOT NULL, dtype TEXT NOT NULL, shape BLOB NOT NULL, data BLOB NOT NULL);
"""

_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """Training state after ``step`` local steps; ``sums`` are running metric sums, ``basis`` says what the training began
    with beside the task.

    ``tensors`` are names and arrays, made one at a time and to be walked once: hold on to none that is not needed.
    """

    step: int
    sums: dict[str, float]
    tensors: Iterable[tuple[str, Array]]
    basis: str = ""


@dataclass(frozen=True)
class TensorRow:
    """Row of a tensor; ``dtype`` is numpy's, with byte order (``<f4``)."""

    id: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def replace(db: sqlite3.Connection, nonce: str, checkpoint: Checkpoint) -> None:
    """Keep ``checkpoint`` instead of any other. Draws its tensors one after the other; what they raise passes."""
    delete(db)
    db.execute(
        "INSERT INTO checkpoint VALUES(?, ?, ?, ?)",
        (nonce, checkpoint.step, msgspec.msgpack.encode(checkpoint.sums), checkpoint.basis),
    )
    for name, array in checkpoint.tensors:
        _insert(db, nonce, name, array)
        del array  # or it would live on while the next one is made


def delete(db: sqlite3.Connection) -> None:
    """Drop the checkpoint, its tensors with it."""
    db.execute("DELETE FROM checkpoint")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose tensors are still in the file."""

    step: int
    sums: dict[str, float]
    basis: str
    rows: list[TensorRow]


def find(db: sqlite3.Connection, nonce: str) -> StoredCheckpoint | None:
    """Return the checkpoint of this task, None if there is none."""
    head = db.execute("SELECT step, sums, basis FROM checkpoint WHERE nonce = ?", (nonce,)).fetchone()
    if head is None:
        return None
    rows = db.execute(
        "SELECT id, name, dtype, shape FROM checkpoint_tensors WHERE nonce = ? ORDER BY id", (nonce,)
    )
    listed = [
        TensorRow(key, name, dtype, msgspec.msgpack.decode(shape, type=tuple[int, ...]))
        for key, name, dtype, shape in rows
    ]
    step, sums, basis = head
    return StoredCheckpoint(step, msgspec.msgpack.decode(sums, type=dict[str, float]), basis, listed)


def read(db: sqlite3.Connection, row: TensorRow) -> Array:
    """Return the tensor of a row, in memory of its own."""
    array = np.empty(row.shape, row.dtype)
    view = array.reshape(-1).view(np.uint8)
    with db.blobopen("checkpoint_tensors", "data", row.id, readonly=True) as blob:
        for start in range(0, array.nbytes, _PIECE_BYTES):
            piece = blob.read(_PIECE_BYTES)
            view[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    return array


def _insert(db: sqlite3.Connection, nonce: str, name: str, array: Array) -> None:
    shape = msgspec.msgpack.encode(array.shape)
    row = {"nonce": nonce, "name": name, "dtype": array.dtype.str, "shape": shape}
    insert(db, "checkpoint_tensors", row, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data])
