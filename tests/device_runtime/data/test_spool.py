"""Data that memory cannot hold: text and tables that are read piece by piece, and lie on the disk where they are many."""

from __future__ import annotations

import mmap
import tracemalloc
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from edgefl.data.text.vocabulary import words
from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import SeriesSpec, TableSpec, TextSpec
from edgefl.wire.tensors import Array
from edgefl_device.data import problems, spool, tables, texts
from edgefl_device.data.samples import LabelSpec
from edgefl_device.data.spool import Spool
from tests.device_runtime.data.files import every, fitted, written
from tests.device_runtime.data.test_texts import tokenized

RUNNING = DataSpec(shape=(5,), dtype="int64", classes=256, below=256, reader=TextSpec())
NEXT = LabelSpec((5,))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def mapped(array: object) -> bool:
    """Whether it lies in a file."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


@pytest.mark.parametrize("limit", [0, 20, 1000])
def test_rows_are_the_same_wherever_they_lie(limit: int) -> None:
    made = Spool("uint16", (2,), limit)
    rows = np.arange(40).reshape(20, 2)
    for start in range(0, 20, 7):
        made.extend(rows[start : start + 7])
    made.truncate(9)
    made.extend(rows[15:].astype(np.float64))

    found = made.array()

    np.testing.assert_array_equal(found, [*rows[:9], *rows[15:]])
    assert (len(made), found.dtype, mapped(found)) == (14, np.uint16, limit < 1000)
    assert not (mapped(found) and found.flags.writeable)


@pytest.mark.parametrize("limit", [0, 1000])
def test_no_rows_are_an_empty_array(limit: int) -> None:
    made = Spool("float32", (3,), limit)
    assert made.array().shape == (0, 3)
    made.extend(np.ones((2, 3)))
    made.truncate(0)
    assert made.array().shape == (0, 3)


def _full(**_: object) -> IO[bytes]:
    return Path("/dev/full").open("w+b")


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool.tempfile, "TemporaryFile", _full)
    made = Spool("uint8", (), 10)
    with pytest.raises(DataError, match="on the disk and more, which is full"):
        made.extend(np.zeros(100))
        made.array()


def test_rows_lie_elsewhere_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(spool, "_folder", lambda: tmp_path / "file")
    made = Spool("uint8", (), 10)
    made.extend(np.arange(100))
    np.testing.assert_array_equal(made.array(), np.arange(100))

    monkeypatch.setattr(spool.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME or TMPDIR"):
        Spool("uint8", (), 10).extend(np.arange(100))


# -- running text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_pieces_of_a_text_give_all_windows(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    text = "To be, or not to be:\nthat is\r\nthe question. Žluťoučký kůň\n\n" * 4
    written(folder / "d" / "a.txt", text)
    written(folder / "d" / "b.jsonl", '{"text": "a line"}\n{"text": "another one"}\n')
    whole = fitted(folder / "d", RUNNING, NEXT)

    monkeypatch.setattr(texts, "PIECE", 7)
    monkeypatch.setattr(spool, "IN_MEMORY", limit)
    found = fitted(folder / "d", RUNNING, NEXT)

    np.testing.assert_array_equal(every(found), every(whole))
    np.testing.assert_array_equal(found.y, whole.y)
    assert (mapped(found.x), mapped(whole.x)) == (not limit, False)
    drawn = found.labels(np.arange(3))
    assert drawn.dtype == np.int64 and found.rows(np.arange(3)).dtype == np.int64


def test_words_stay_whole_where_a_text_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat sat on the mat and the dog sat on the cat\n" * 3 + "the mat " * 9
    known = words([text], 20)
    spec, parts = tokenized(known.tokenizer, below=known.size, classes=known.size, names=())
    path = written(folder / "d" / "a.txt", text)
    whole = fitted(path.parent, spec, NEXT, parts=parts)

    monkeypatch.setattr(texts, "PIECE", 11)

    np.testing.assert_array_equal(every(fitted(path.parent, spec, NEXT, parts=parts)), every(whole))


@pytest.mark.parametrize(
    ("end", "below", "text"),
    [
        (b"caf\xe9", 256, "it cannot be read as text"),
        ("é".encode(), 128, "token 195 is beyond the vocabulary"),
    ],
)
def test_a_text_whose_end_is_bad_is_left_out_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: bytes, below: int, text: str
) -> None:
    monkeypatch.setattr(texts, "PIECE", 10)
    written(folder / "d" / "a.txt", b"plain words " * 5)
    written(folder / "d" / "b.txt", b"more of them " * 9 + end)
    written(folder / "d" / "c.txt", b"the last words")
    spec = DataSpec(shape=(5,), dtype="int64", classes=below, below=below, reader=TextSpec())

    with pytest.raises(DataError, match=text):
        fitted(folder / "d", spec, NEXT)
    data = fitted(folder / "d", spec, NEXT, "skip")

    assert data.skipped.count == 1
    assert bytes(every(data).ravel().tolist()) == (b"plain words " * 5 + b"the last words")[: 5 * len(data)]


def test_an_empty_file_and_a_blank_one_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 4)
    written(folder / "d" / "a.txt", "some words")
    for content in ("", "\n" * 9):
        written(folder / "d" / "b.txt", content)
        with pytest.raises(DataError, match=r"b\.txt: the text is empty"):
            fitted(folder / "d", RUNNING, NEXT)


def test_reading_takes_less_than_the_text_is_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 1 << 16)
    monkeypatch.setattr(spool, "IN_MEMORY", 1 << 16)
    monkeypatch.setattr(problems, "_SCANNED", 1 << 16)
    text = b"It was the best of times, it was the worst of times.\n" * 80_000
    path = written(folder / "d" / "a.txt", text)
    spec = DataSpec(shape=(64,), dtype="int64", classes=256, below=256, reader=TextSpec())

    tracemalloc.start()
    data = fitted(path.parent, spec, LabelSpec((64,)))
    data.rows(np.arange(32)), data.labels(np.arange(32))
    counts = data.facts()["class_counts"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < len(text)
    assert counts.sum() == data.y.size and counts[ord("w")] == pytest.approx(3 * 80_000, rel=1e-3)


# -- records ---------------------------------------------------------------------------------------------------


def many(folder: Path, rows: int = 50) -> tuple[Path, Array]:
    values = np.random.default_rng(0).integers(-9, 9, (rows, 3))
    lines = "".join(f"{a},{b},{c},{n % 2}\n" for n, (a, b, c) in enumerate(values))
    return written(folder / "r" / "d.csv", "a,b,c,label\n" + lines), values


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_table_of_blocks_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(tables, "TOGETHER", 8)
    monkeypatch.setattr(spool, "IN_MEMORY", limit)
    path, values = many(folder)
    reader = TableSpec(columns=("a", "b"), mean=(1.0, 0.0), deviation=(2.0, 1.0), label="label")
    spec = DataSpec(
        shape=(2,),
        dtype="float32",
        classes=2,
        reader=reader,
        others=(Input(name="c", shape=(1,), dtype="int64"),),
    )

    data = fitted(path, spec)

    np.testing.assert_array_equal(every(data), ((values[:, :2] - [1, 0]) / [2, 1]).astype(np.float32))
    np.testing.assert_array_equal(data.labels(np.arange(50)), np.arange(50) % 2)
    np.testing.assert_array_equal(data.other("c", np.arange(50)), values[:, 2:])
    assert mapped(data.x) == (not limit)


def test_windows_of_long_recordings_lie_on_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = many(folder)
    written(folder / "r" / "e.csv", path.read_bytes())
    reader = SeriesSpec(columns=("a", "b", "c"), window=4, step=3, label="label", channels_last=True)
    spec = DataSpec(shape=(4, 3), dtype="float32", classes=2, reader=reader)
    monkeypatch.setattr("edgefl_device.data.tables.TOGETHER", 8)
    monkeypatch.setattr(spool, "IN_MEMORY", 0)

    data = fitted(folder / "r", spec)

    windows = [values[start : start + 4] for start in range(0, 47, 3)]
    np.testing.assert_array_equal(every(data), [*windows, *windows])
