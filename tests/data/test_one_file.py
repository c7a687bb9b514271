"""One CSV or file of JSON lines as the data of a federation, read as devices read theirs."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import edgefl
from edgefl.config.reading import checked, parse
from edgefl.data import photos
from edgefl.data.dataset import Dataset
from edgefl.models.user_factory import factory_of
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import data_spec
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundSpec, TableSpec
from edgefl_device.data.samples import LabelSpec
from edgefl_device.data.sources import load
from tests.device_runtime.data.files import every, fitted, image, pillow, written
from tests.docs.documents import DOCS, blocks, content
from tests.support.errors import ConfigError, DataError, refuses

CLASSES = ("setosa", 'versi, "color"', "caf\u00e9")


def flowers(path: Path, rows: int = 30) -> Path:
    """Write a CSV with class names that need quotation marks, accents apart, and a column of one value."""
    names = ("setosa", '"versi, ""color"""', "cafe\u0301")
    lines = [f"{row}.5,{row % 7},1,{names[row % 3]}" for row in range(rows)]
    path.write_text("\n".join(["petal,sepal,one,species", *lines, ""]), encoding="utf-8-sig")
    return path


def dataset(path: Path, **table: object) -> Dataset:
    data = edgefl.config.DataTable(name="file", file=str(path), **table)
    return open_data(edgefl.federation("mlp", data=data))


def test_a_device_reads_the_file_as_the_federation_does(tmp_path: Path) -> None:
    path = flowers(tmp_path / "flowers.csv")
    found = dataset(path, label="species")
    device = load(path).fitted(data_spec(found), LabelSpec())
    x = device.rows(np.arange(len(device)))

    assert found.names == tuple(sorted(CLASSES))
    assert (len(found.train_x), len(found.test_x)) == (24, 6)
    np.testing.assert_array_equal(np.bincount(found.test_y), [2, 2, 2])
    for part, labels in ((found.train_x, found.train_y), (found.test_x, found.test_y)):
        rows = [np.flatnonzero((x == sample).all(axis=1)).item() for sample in part]
        np.testing.assert_array_equal(device.y[rows], labels)
    np.testing.assert_allclose(found.train_x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.train_x.std(axis=0), [1, 1, 0], atol=1e-6)


def test_the_documented_example_is_a_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {block.file: content(block) for block in blocks(DOCS / "models" / "data.md") if block.file}
    for name in ("flowers.toml", "net.py"):
        Path(name).write_text(files[name])
    flowers(Path("flowers.csv"))
    federation = checked(Path("flowers.toml"))
    data = open_data(federation)
    parts = partition(federation, data, 4, warn=lambda _: None)

    net = factory_of(federation.model.name, "model")(features=data.shape[-1], classes=data.classes)

    assert net(torch.from_numpy(data.test_x)).shape == (6, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(24))


@pytest.mark.parametrize(
    ("labels", "classes", "names"),
    [
        (("0", "1", "2"), 3, ()),
        (("0.0", "1.0", "0"), 2, ()),
        (("1", "3", "2"), 3, ("1", "2", "3")),
        (("-1", "1", "10"), 3, ("-1", "1", "10")),
        (("-1", "+1", "+1"), 2, ("-1", "+1")),
        (("yes", "no", "1"), 3, ("1", "no", "yes")),
        (("1.5", "2", "-1e3"), 1, ()),
    ],
)
def test_labels_are_classes_or_numbers(
    labels: tuple[str, ...], classes: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,label\n" + "".join(f"{row},{labels[row % 3]}\n" for row in range(12)))
    found = dataset(path)

    assert (found.classes, found.names) == (classes, names)
    assert found.train_y.dtype == (np.float32 if classes == 1 else np.int64)


def test_texts_are_taken_from_the_column_text(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("label,text\n" + 'good,"so, good"\nbad,"long ""film""\nbad"\n' * 5)
    found = dataset(path, tokens="bytes", length=16)
    device = load(path).fitted(data_spec(found), LabelSpec())

    assert (found.names, found.below, found.shape) == (("bad", "good"), 256, (16,))
    assert {*map(bytes, device.rows(np.arange(10)).astype(np.uint8))} == {
        bytes(row) for row in found.train_x.astype(np.uint8)
    }


def test_a_reader_chooses_columns_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"a": row, "b": "x", "c": row % 2}) + "\n" for row in range(10)))
    reader = {"kind": "table", "columns": ["a"], "label": "c", "mean": [1], "deviation": [2]}
    found = dataset(path, reader=reader, devices_dir=str(tmp_path))

    assert (len(found.train_x), found.classes) == (0, 2)
    np.testing.assert_allclose(found.test_x[:, 0], (np.arange(10) - 1) / 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,y\n1,2\n", "has no column 'label', .* it has 'a', 'y'"),
        ("a,label\n1,x\nno,y\n", "line 3: column 'a' is 'no', which is no number"),
        ("a,label\n1,x\n2,\n", "line 3: the label is empty"),
        ('a,label\n1,x\n2,"y\n3,x\n', "line 3: a quotation mark is opened here and never closed"),
        ("a,label\n1,x\n2,x\n", "has 1 class, expected at least 2"),
        ("a,label\n1,x\n2,y\n", "expected at least 2 samples of a class"),
        ("label\nx\ny\n", "no column beside 'label'"),
        ("a,label\n", "has no records"),
        ("", "has no records"),
        ("a;label\n1,5;x\n", "separates its columns by ';', expected commas"),
        ("a,label\n1,x,\n", "line 2: it has 3 fields, and there are 2 columns"),
        ("a,label\n1,0\n2,nan\n", "line 3: the label is 'nan', which is no number"),
        ("a,label\n1,1.5\n2,#N/A\n", "line 3: the label is '#N/A', which is no number"),
        ("a,label\n1,0\n2,1e0\n", "line 3: the label is '1e0': write a class in digits"),
        ("a,label\n1,x\n2,y\0\n", "line 3: the label is no text"),
        ('{"a": 1, "label": "x"}\n{"a": 2, "label": "\\ud800"}\n', "line 2: the label is no text"),
        ('[{"a": 1, "label": "x"}]\n', "line 1: it is no JSON object"),
        ("a,label\n" + "".join(f"1,{row * 7}\n" for row in range(101)), "101 different whole numbers"),
    ],
)
def test_a_file_that_is_no_dataset_is_refused_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / ("t.jsonl" if text.startswith(("{", "[")) else "t.csv")
    path.write_text(text)

    with pytest.raises(DataError, match=problem):
        dataset(path)


def test_label_and_reader_exclude_each_other(tmp_path: Path) -> None:
    table = {"name": "file", "file": str(flowers(tmp_path / "t.csv")), "label": "species"}
    with pytest.raises(ConfigError, match="set it in the reader"):
        parse({"data": {**table, "reader": {"kind": "text"}}}, source="test")


# -- kinds of files that people have ---------------------------------------------------------------------------


RECORDS = DataSpec(
    shape=(2,),
    dtype="float32",
    classes=2,
    names=("no", "yes"),
    reader=TableSpec(columns=("a", "b"), label="y"),
)
ARRAYS = DataSpec(shape=(2,), dtype="float32", classes=2)
PHOTOS = DataSpec(shape=(3, 2, 2), dtype="float32", classes=2, names=("cat", "dog"))
SOUNDS = DataSpec(
    shape=(4,), dtype="float32", classes=2, names=("off", "on"), reader=SoundSpec(rate=8000, length=4)
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
    with refuses(DataError, path=str(file), expected=".npz"):
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

    with refuses(DataError, row=1):
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
