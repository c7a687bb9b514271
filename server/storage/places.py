"""Where the bytes of updates go, by the name of the place: a folder of this machine, or any place that fsspec reaches."""

from __future__ import annotations

from pathlib import Path

from server.storage.update_files import UpdateFiles
from server.storage.update_store import UpdateStore


def store_at(place: str, writer: str = "") -> UpdateStore:
    """``writer`` is part of the names of what this process writes there. StoreError for a place that cannot be used."""
    return UpdateFiles(Path(place), writer)
