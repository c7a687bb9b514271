"""Where a run's journal lies, and where the bytes of its updates go."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from server.storage.update_files import UpdateFiles
from server.storage.update_objects import UpdateObjects
from server.storage.update_store import UpdateStore

_FILE = "file://"


def journal_at(path: Path) -> str:
    """The URL of a journal that is a file, whatever its folder is called."""
    return sa.URL.create("sqlite", database=str(path)).render_as_string()


def place_of(chosen: str, federation: str, folder: Path) -> str:
    """Where the bytes of a federation's updates go: below the place that was ``chosen``, which others may share, or, without
    one, in the ``folder`` of the run."""
    return f"{chosen.rstrip('/')}/{federation}" if chosen else str(folder / "updates")


def store_at(place: str, writer: str = "") -> UpdateStore:
    """A folder, of this machine or one that several share, or an fsspec URL. ``writer`` is part of the names of what this
    process writes there. StoreError for a place that cannot be used."""
    if "://" in place and not place.startswith(_FILE):
        return UpdateObjects(place, writer)
    return UpdateFiles(Path(place.removeprefix(_FILE)), writer)
