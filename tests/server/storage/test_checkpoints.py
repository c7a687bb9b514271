"""Checkpoints: whole or not there, equal bytes for equal weights, the last few kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import StoreError
from edgefl_server.storage.checkpoints import KEPT, Checkpoints

WEIGHTS = {"b": np.ones(3, np.float32), "a": np.zeros((2, 2), np.float32)}


def test_what_is_saved_is_loaded_and_named_by_its_digest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    digest = checkpoints.save(7, WEIGHTS)
    path = tmp_path / "checkpoints" / "round-0007.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert digest == checkpoints.finish(dict(reversed(WEIGHTS.items())))
    loaded = checkpoints.load(7)
    assert all(np.array_equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(6):
        checkpoints.save(number, WEIGHTS)
        checkpoints.prune(number)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"round-{number:04d}.safetensors" for number in range(6 - KEPT, 6)
    ]


def test_a_checkpoint_that_is_still_needed_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(8):
        checkpoints.save(number, WEIGHTS)
        checkpoints.prune(number, {1, 2})
    assert {path.stem for path in (tmp_path / "checkpoints").iterdir()} == {
        f"round-{number:04d}" for number in (1, 2, *range(8 - KEPT, 8))
    }


def test_a_full_disk_is_told_with_the_file_and_a_remedy(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "checkpoints" / "round-0001.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(
        StoreError, match=r"round-0001\.safetensors cannot be written \(No space left.*free some space"
    ):
        checkpoints.save(1, WEIGHTS)


def test_a_half_written_file_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, WEIGHTS)
    (tmp_path / "checkpoints" / "round-0002.safetensors.partial").write_bytes(b"half")
    with pytest.raises(StoreError, match="round-0002"):
        checkpoints.load(2)
    assert checkpoints.load(1)
