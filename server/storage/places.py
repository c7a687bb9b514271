"""Where the bytes of updates go, by the name of the place."""

from __future__ import annotations

from pathlib import Path

from server.storage.update_files import UpdateFiles
from server.storage.update_objects import UpdateObjects
from server.storage.update_store import UpdateStore

_FILE = "file://"


def store_at(place: str, writer: str = "") -> UpdateStore:
    """A folder, of this machine or one that several share, or an fsspec URL. ``writer`` is part of the names of what this
    process writes there. StoreError for a place that cannot be used."""
    if "://" in place and not place.startswith(_FILE):
        return UpdateObjects(place, writer)
    return UpdateFiles(Path(place.removeprefix(_FILE)), writer)
