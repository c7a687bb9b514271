"""Stores on a folder, and checkpoints to put there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.wire.tensors import Array
from edgefl_device.store.database import FILE, Checkpoint, Store

TENSORS = {
    "state.weights.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "state.count": np.array(3, np.int64),
    "state.empty": np.zeros((0, 4), np.float32),
    "state.mask": np.array([True, False]),
    "state.columns": np.arange(6, dtype=np.float64).reshape(2, 3).T,
}


def open_store(folder: Path, *, limit: int = 1000, history: int = 5) -> Store:
    return Store(folder, limit_bytes=limit, history_rounds=history)


def run_sql(store: Store, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on the file of an open store, and return its rows."""
    with closing(sqlite3.connect(store.folder / FILE)) as db, db:
        return db.execute(statement).fetchall()


def carry_of(store: Store, name: str) -> bytes | None:
    """The newest carry of a name."""
    rows = [kept for kept in store.carries() if kept.name == name]
    return store.carry(rows[-1]) if rows else None


def checkpoint(step: int, tensors: Iterable[tuple[str, Array]] | None = None) -> Checkpoint:
    return Checkpoint(step, {"loss": 0.1 + 0.2}, TENSORS.items() if tensors is None else tensors)


def step_of(store: Store, nonce: str = "n1") -> int | None:
    """The step of the kept checkpoint, once its tensors were read whole."""
    kept = store.checkpoint(nonce)
    if kept is None:
        return None
    assert dict(kept.tensors).keys() == TENSORS.keys()
    return kept.step
