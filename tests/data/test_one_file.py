"""One CSV or file of JSON lines as the data of a federation, read as devices read theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import edgefl
from edgefl.config.reading import checked, parse
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, DataError
from edgefl.models.user_factory import factory_of
from edgefl.setup.data import open_data, partition
from edgefl.setup.samples import data_spec
from edgefl_device.data.samples import LabelSpec
from edgefl_device.data.sources import load
from tests.docs.documents import DOCS, blocks, content

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
