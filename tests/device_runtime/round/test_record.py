"""The record of boundary activations: what was written, of the model it was written for, or nothing (I20)."""

from __future__ import annotations

import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from edgefl_device.round.forward import ActivationRecord
from tests.support.errors import StaleRecordError, StoreError, refuses

ROWS = np.random.default_rng(0).standard_normal((7, 2, 3)).astype(np.float32)


def written(path: Path, version: str = "v1", *, seal: bool = True) -> ActivationRecord:
    record = ActivationRecord.create(path, ROWS.shape, "float32", version)
    record.write(0, ROWS[:4])
    record.write(4, ROWS[4:])
    if seal:
        record.seal()
    return record


def test_rows_equal_what_was_written(tmp_path: Path) -> None:
    with written(tmp_path / "r.bin") as record:
        picked = record.rows(np.array([6, 0, 0, 3]), "v1")

    np.testing.assert_array_equal(picked, ROWS[[6, 0, 0, 3]])


def test_rows_are_copies_that_outlive_the_record(tmp_path: Path) -> None:
    record = written(tmp_path / "r.bin")
    picked = record.rows(np.array([1, 2]), "v1")
    record.delete()

    picked += 1.0
    np.testing.assert_array_equal(picked, ROWS[[1, 2]] + 1.0)


def test_a_sealed_record_is_reopened_with_the_same_rows(tmp_path: Path) -> None:
    written(tmp_path / "r.bin").close()

    with ActivationRecord.reopen(tmp_path / "r.bin", "v1") as record:
        assert record.shape == ROWS.shape
        np.testing.assert_array_equal(record.rows(np.arange(7), "v1"), ROWS)


def test_i20_rows_for_another_model_version_raise(tmp_path: Path) -> None:
    with written(tmp_path / "r.bin", "v1") as record, refuses(StaleRecordError, recorded="v1", wanted="v2"):
        record.rows(np.array([0]), "v2")


def test_i20_a_record_of_another_model_version_is_not_reopened(tmp_path: Path) -> None:
    written(tmp_path / "r.bin", "v1").close()

    with refuses(StaleRecordError, recorded="v1", wanted="v2"):
        ActivationRecord.reopen(tmp_path / "r.bin", "v2")


def test_a_half_written_record_is_not_reopened(tmp_path: Path) -> None:
    written(tmp_path / "r.bin", seal=False).close()

    with refuses(StaleRecordError, record="r.bin"):
        ActivationRecord.reopen(tmp_path / "r.bin", "v1")


def test_writing_anew_unseals_the_record_before(tmp_path: Path) -> None:
    written(tmp_path / "r.bin").close()
    written(tmp_path / "r.bin", seal=False).close()

    with pytest.raises(StaleRecordError):
        ActivationRecord.reopen(tmp_path / "r.bin", "v1")


@pytest.mark.parametrize("keep", [0, 1, 4, ROWS.nbytes - 4, ROWS.nbytes + 4])
def test_a_record_whose_file_has_another_size_is_not_reopened(tmp_path: Path, keep: int) -> None:
    written(tmp_path / "r.bin").close()
    with (tmp_path / "r.bin").open("r+b") as file:
        file.truncate(keep)

    with refuses(StaleRecordError, record="r.bin"):
        ActivationRecord.reopen(tmp_path / "r.bin", "v1")


def test_a_record_whose_file_is_gone_is_not_reopened(tmp_path: Path) -> None:
    written(tmp_path / "r.bin").close()
    (tmp_path / "r.bin").unlink()

    with pytest.raises(StaleRecordError):
        ActivationRecord.reopen(tmp_path / "r.bin", "v1")


@pytest.mark.parametrize("meta", [b"", b"\x93\xa2v1", b"garbage", b"\x93\xa2v1\x91\x07\xa7nothing"])
def test_a_record_with_a_damaged_tag_is_not_reopened(tmp_path: Path, meta: bytes) -> None:
    written(tmp_path / "r.bin").close()
    (tmp_path / "r.meta").write_bytes(meta)

    with pytest.raises(StaleRecordError):
        ActivationRecord.reopen(tmp_path / "r.bin", "v1")


def test_a_deleted_record_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "r.bin").delete()

    assert list(tmp_path.iterdir()) == []


def test_rows_of_other_types_survive(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.int64).reshape(6, 1)
    with ActivationRecord.create(tmp_path / "r.bin", values.shape, "int64", "v") as record:
        record.write(0, values)
        np.testing.assert_array_equal(record.rows(np.array([5, 1]), "v"), values[[5, 1]])


def test_a_disk_too_full_for_the_record_is_a_store_error_and_no_sigbus(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from edgefl_device.round.forward import ActivationRecord;"
        "from edgefl.errors import StoreError;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: ActivationRecord.create(Path(sys.argv[1]) / 'r.bin', (1 << 20, 2), 'float32', 'v')\n"
        "except StoreError as error: print(error.message)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )

    assert "8.0 MiB" in ended.stdout
    assert str(tmp_path) in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["rows", "tag"])
def test_a_disk_that_refuses_later_is_told_with_the_path(tmp_path: Path, part: str) -> None:
    record = ActivationRecord.create(tmp_path / "r.bin", (2, 3), "float32", "v")
    if part == "rows":
        record.close()
        record._file = FileIO("/dev/full", "r+")
    else:
        (tmp_path / "r.meta").symlink_to("/dev/full")

    with pytest.raises(
        StoreError, match=r"r\.bin cannot be written \(No space left on device\): free some space"
    ):
        record.write(0, np.ones((2, 3), np.float32))
        record.seal()
    record.close()


def test_a_record_needs_no_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)

    with written(tmp_path / "r.bin") as record:
        np.testing.assert_array_equal(record.rows(np.arange(7), "v1"), ROWS)
    assert (tmp_path / "r.bin").stat().st_blocks > 0
