"""A look into a device's store from another process, which may not open it: its agent has it, or may start meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from edgefl.errors import StoreError
from edgefl_device.store.file import FILE


def facts_in(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """What the store in ``folder`` keeps under ``names``, nothing where there is none. StoreError if it cannot be read."""
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
            f"the device's store {path} cannot be read: {error}; let this user read it and write beside it, or name the "
            "server's key by `server_key`"
        ) from error
