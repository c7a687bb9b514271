"""What devices and servers keep is readable by their owner only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import UpdateFiles, journal_at
from tests.device_runtime.store.stores import open_store

pytestmark = pytest.mark.skipif(os.name != "posix", reason="other systems have no modes")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def readable_by_others(folder: Path) -> list[str]:
    places = [folder, *folder.rglob("*")]
    return [str(place) for place in places if place.stat().st_mode & 0o077]


def test_a_store_is_private_also_if_an_earlier_release_made_its_folder(tmp_path: Path) -> None:
    for name in ("new", "old"):
        folder = tmp_path / name
        if name == "old":
            folder.mkdir()
        store = open_store(folder)
        assert readable_by_others(folder) == []
        store.close()


def test_journal_updates_and_checkpoints_are_private(tmp_path: Path) -> None:
    files = UpdateFiles(tmp_path / "updates")
    journal = Journal(journal_at(tmp_path / "journal.sqlite"), "demo", files)
    files.append(1, [b"update"])
    Checkpoints(tmp_path).save(1, {"w": np.zeros(3, np.float32)})
    made = [*tmp_path.glob("journal*"), tmp_path / "updates", tmp_path / "checkpoints"]
    assert len(made) >= 3
    assert [place for each in made for place in readable_by_others(each)] == []
    journal.close()
