"""Whatever bytes a file holds: it is read, or it is named in a DataError."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SeriesReader, SoundReader, TextReader
from tests.device_runtime.data.files import every, fitted, image, sound, written

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
SPECS = {
    "png": DataSpec(shape=(3, 4, 4), dtype="float32", classes=1),
    "jpg": DataSpec(shape=(1, 2, 4), dtype="float32", classes=1),
    "wav": DataSpec(shape=(8,), dtype="float32", classes=1, reader=SoundReader(rate=8000, length=8)),
    "txt": DataSpec(shape=(4,), dtype="int64", classes=1, below=256, reader=TextReader()),
    "csv": DataSpec(
        shape=(1, 2), dtype="float32", classes=1, reader=SeriesReader(columns=("a",), window=2, step=1)
    ),
    "npy": DataSpec(shape=(4, 3), dtype="float32", classes=1),
}


def whole(suffix: str, folder: Path) -> bytes:
    path = folder / f"whole.{suffix}"
    if suffix in ("png", "jpg"):
        image(path, PIXELS)
    elif suffix == "wav":
        sound(path, np.arange(9, dtype=np.int16))
    elif suffix == "npy":
        np.save(path, np.ones((4, 3), np.float32))
    else:
        written(path, "a\n1\n2\n3\n")
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 2000), value=st.binary(max_size=3), cut=st.booleans())
@pytest.mark.parametrize("suffix", SPECS)
def test_damaged_files_are_refused(tmp_path: Path, suffix: str, place: int, value: bytes, cut: bool) -> None:
    content = whole(suffix, tmp_path)
    (tmp_path / f"whole.{suffix}").unlink()
    place %= len(content)
    damaged = content[:place] + value + (b"" if cut else content[place + len(value) :])
    path = written(tmp_path / "0" / f"damaged.{suffix}", damaged)
    try:
        data = fitted(tmp_path, SPECS[suffix])
    except DataError as error:
        assert path.name in error.message or str(tmp_path) in error.message
        return
    assert np.isfinite(every(data)).all()


@pytest.mark.parametrize("suffix", SPECS)
def test_a_whole_file_is_read(tmp_path: Path, suffix: str) -> None:
    written(tmp_path / "0" / f"good.{suffix}", whole(suffix, tmp_path))
    (tmp_path / f"whole.{suffix}").unlink()

    assert every(fitted(tmp_path, SPECS[suffix])).shape[1:] == SPECS[suffix].shape
