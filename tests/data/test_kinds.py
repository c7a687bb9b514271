"""Kinds of files that people have: read alike by a device and for a federation, or refused with the file and the reason."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from edgefl.data import photos
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundReader, TableReader
from tests.device_runtime.data.files import every, fitted, image, pillow, written

RECORDS = DataSpec(
    shape=(2,),
    dtype="float32",
    classes=2,
    names=("no", "yes"),
    reader=TableReader(columns=("a", "b"), label="y"),
)
ARRAYS = DataSpec(shape=(2,), dtype="float32", classes=2)
PHOTOS = DataSpec(shape=(3, 2, 2), dtype="float32", classes=2, names=("cat", "dog"))
SOUNDS = DataSpec(
    shape=(4,), dtype="float32", classes=2, names=("off", "on"), reader=SoundReader(rate=8000, length=4)
)
ROWS = "a,b,y\n1,2,no\n3,4,yes\n"

REFUSED_RECORDS: dict[str, tuple[str | bytes, str]] = {
    "t.csv.gz": (gzip.compress(ROWS.encode()), "found t.csv.gz: unpack it"),
    "t.parquet": (b"PAR1", "found t.parquet: write it as .csv"),
    "t.json": ("[]", "found t.json: write one object a line, as .jsonl"),
    "short.csv": ("a,b,y\n1,2,no\n3,4\n", "line 3: the label is empty"),
    "wide.csv": (ROWS.encode("utf-16-be"), r"cannot be read as text \(UTF-8\)"),
    "none.jsonl": ('{"a": 1, "b": 2}\n', "line 1: the label is empty"),
}


@pytest.mark.parametrize("name", REFUSED_RECORDS)
def test_records_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    content, reason = REFUSED_RECORDS[name]
    file = written(tmp_path / name, content)

    with pytest.raises(DataError, match=rf"{name}.*{reason}"):
        fitted(file, RECORDS)
    with pytest.raises(DataError, match=rf"{name} is no \.npz archive; .* a folder of photos"):
        Dataset.load(file)


@pytest.mark.parametrize("dtype", [">f4", ">i2", "<u4"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("form", ["x.NPZ", "folder", "classes"])
def test_arrays_of_every_byte_order_are_read(tmp_path: Path, dtype: str, order: str, form: str) -> None:
    x = np.array([[1, 2], [3, 4]], dtype, order=order)  # type: ignore[call-overload]
    y = np.array([0, 1], ">i8")
    if form == "x.NPZ":
        with (tmp_path / form).open("wb") as file:
            np.savez(file, x=x, y=y)
    else:
        files = {"x": x, "y": y} if form == "folder" else {"0/x": x[0], "1/x": x[1]}
        for name, array in files.items():
            (tmp_path / form / name).parent.mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / form / name, array)

    np.testing.assert_array_equal(every(fitted(tmp_path / form, ARRAYS)), [[1, 2], [3, 4]])


def test_arrays_of_objects_are_named(tmp_path: Path) -> None:
    good, bad = np.zeros((2, 2), np.float32), np.array([{}, {}])
    names = ("x", "y", "train_x", "train_y", "test_x", "test_y")
    np.savez(tmp_path / "d.npz", **{name: good for name in names}, meta=bad)  # type: ignore[arg-type]
    for read in (Dataset.load, lambda path: fitted(path, ARRAYS)):
        with pytest.raises(DataError, match=r"d\.npz cannot be read: array 'meta' holds Python objects"):
            read(tmp_path / "d.npz")
    (tmp_path / "0").mkdir()
    np.save(tmp_path / "0" / "s.npy", bad)
    with pytest.raises(DataError, match=r"0/s\.npy: cannot be read: it holds Python objects"):
        fitted(tmp_path, ARRAYS)


@pytest.mark.parametrize("part", ["train_x", "test_x", "test_y"])
def test_a_datasets_values_are_finite(part: str) -> None:
    arrays = {"train_x": np.zeros((3, 2)), "train_y": np.zeros(3), "test_x": np.zeros((3, 2))}
    arrays["test_y"] = np.zeros(3)
    arrays[part][1] = np.nan

    with pytest.raises(DataError, match=r"NaN or infinite ones in 1 rows, first in row 1"):
        Dataset.of(arrays["train_x"], arrays["train_y"], arrays["test_x"], arrays["test_y"])


def _photos(folder: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(2):
            image(folder / name / f"{number}.PNG", np.full((2, 2, 3), 9, np.uint8))
    return folder


@pytest.mark.parametrize("name", ["a.gif", "a.WEBP", "a.bmp", "a.tiff", "gone.jpg", "empty.jpg", "old"])
def test_a_picture_that_is_not_read_is_refused(tmp_path: Path, name: str) -> None:
    place = _photos(tmp_path) / "cat" / name
    if name == "old":
        image(place / "a.png", np.zeros((2, 2, 3), np.uint8))
    elif name == "gone.jpg":
        place.symlink_to(tmp_path / "nowhere")
    else:
        written(place, b"")
    for read in (lambda path: photos.load(path, 2), lambda path: fitted(path, PHOTOS)):
        with pytest.raises(DataError, match=rf"cat/{name}:? is"):
            read(tmp_path)

    assert len(fitted(tmp_path, PHOTOS, policy="skip").skipped.first) == 1


def test_pictures_of_other_modes_become_rgb(tmp_path: Path) -> None:
    for mode, pixel in {"CMYK": (0, 255, 255, 0), "P": 1, "RGBA": (255, 0, 0, 128)}.items():
        made = pillow().new(mode, (4, 4), pixel)
        if mode == "P":
            made.putpalette([0, 0, 0, 255, 0, 0])
        place = written(tmp_path / "cat" / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}", b"")
        made.save(place, **({"transparency": 1} if mode == "P" else {}))
    x = every(fitted(tmp_path, PHOTOS))

    np.testing.assert_allclose(x[:, :, 0, 0], [[255, 0, 0]] * 3, atol=2)


def test_one_photo_of_each_class_is_too_few(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        image(tmp_path / name / "a.png", np.zeros((2, 2, 3), np.uint8))

    with pytest.raises(DataError, match="expected at least 2 samples of a class"):
        photos.load(tmp_path, 2)


@pytest.mark.parametrize("riff", [0, 36, 0xFFFFFFFF, 44])
@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_streamed_sound_is_read_whatever_its_sizes_say(tmp_path: Path, riff: int, size: int) -> None:
    head = b"fmt " + struct.pack("<LHHLLHH", 16, 1, 1, 8000, 16000, 2, 16)
    content = b"data" + struct.pack("<L", size) + struct.pack("<4h", 0, 16384, -16384, 8192)
    written(tmp_path / "on" / "a.WAV", b"RIFF" + struct.pack("<L", riff) + b"WAVE" + head + content)

    np.testing.assert_allclose(every(fitted(tmp_path, SOUNDS))[0], [0, 0.5, -0.5, 0.25])
