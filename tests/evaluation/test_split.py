"""Held-out rows: which they are, that they stay, and that the two parts never share one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from edgefl.errors import BundleError, DataError
from edgefl.wire.bundle.manifest import HELD_OUT, DataSpec, Input, Split, decode_manifest, encode_manifest
from edgefl.wire.tensors import Array
from edgefl_device.data import samples
from edgefl_device.data.samples import FittedData, LocalData, LocalSource, fit_rows, is_held_out
from edgefl_device.data.sources import load
from tests.device_runtime import tiny
from tests.wire import held_out_rows

SPEC = DataSpec(shape=(2, 3), dtype="float32", classes=4, scale=1 / 255, shift=-0.5)


def images(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (rows, 2, 3), np.uint8)


def fitted(x: Array) -> FittedData:
    return LocalData(x, np.arange(len(x)) % 4, "rows").fitted(SPEC)


@pytest.mark.parametrize("case", held_out_rows.cases(), ids=lambda case: case.x.dtype.name)
def test_the_rule_is_that_of_the_protocol(case: held_out_rows.HeldOutRows) -> None:
    local = LocalData(case.x, np.arange(len(case.x)), "rows", case.others)
    found = np.flatnonzero(is_held_out(local.fitted(case.spec), case.share, case.seed))
    assert found.tolist() == case.held_out()
    assert case.share / 2 < len(found) / len(case.x) < case.share * 2


def test_a_row_keeps_its_part_whatever_else_there_is() -> None:
    few, more = images(50), images(400, seed=1)
    alone = is_held_out(fitted(few), 0.2, 7)
    order = np.random.default_rng(2).permutation(450)
    among = is_held_out(fitted(np.concatenate([few, more])[order]), 0.2, 7)
    assert among[np.argsort(order)[:50]].tolist() == alone.tolist()
    assert is_held_out(fitted(few), 0.2, 8).tolist() != alone.tolist()
    twice = is_held_out(fitted(np.concatenate([few, few])), 0.2, 7)
    assert twice[:50].tolist() == twice[50:].tolist()


def test_further_inputs_decide_and_labels_do_not() -> None:
    spec = msgspec.structs.replace(SPEC, others=(Input(name="age", shape=(), dtype="float32"),))
    x, ages = np.repeat(images(1), 200, axis=0), np.arange(200, dtype=np.float32)
    first = LocalData(x, np.zeros(200, np.int64), "rows", {"age": ages}).fitted(spec)
    second = LocalData(x, np.ones(200, np.int64), "rows", {"age": ages}).fitted(spec)
    found = is_held_out(first, 0.5, 1)
    assert 60 < found.sum() < 140
    assert found.tolist() == is_held_out(second, 0.5, 1).tolist()


@pytest.mark.parametrize("part", ["train", "held-out"])
def test_a_bundle_uses_the_rows_of_its_part(part: str) -> None:
    bundle = tiny.make_bundle()
    split = Split(share=0.25, seed=3, part=part)  # type: ignore[arg-type]
    manifest = msgspec.structs.replace(bundle.manifest, v=HELD_OUT, split=split)
    source = tiny.local()
    whole = fit_rows(source, bundle.manifest)
    chosen = fit_rows(source, manifest)
    wanted = np.flatnonzero(is_held_out(whole, 0.25, 3) == (part == "held-out"))
    assert 0 < len(chosen) < len(whole)
    every = np.arange(len(chosen))
    assert np.array_equal(chosen.rows(every), whole.rows(wanted))
    assert np.array_equal(chosen.labels(every), whole.labels(wanted))
    assert np.array_equal(chosen.lengths, whole.lengths[wanted])
    assert np.array_equal(chosen.first(2).rows(np.arange(2)), whole.rows(wanted[:2]))


class ArraysInMemory:
    """Rows of an application, which replaces them and adds others in place."""

    def __init__(self, folder: Path) -> None:
        self.x, self.y = images(80), np.arange(80) % 4
        self.source = LocalData(self.x, self.y, "arrays")

    def change(self) -> None:
        self.x.resize((120, 2, 3), refcheck=False)
        self.y.resize(120, refcheck=False)
        self.x[40:] = images(80, seed=1)

    def reopened(self) -> LocalSource:
        return LocalData(self.x.copy(), self.y.copy(), "arrays")


class MappedArrays:
    """Rows in npy files, which are written over while they are mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        np.save(folder / "x.npy", images(80))
        np.save(folder / "y.npy", np.arange(80) % 4)
        self.source = load(folder)

    def change(self) -> None:
        with (self.folder / "x.npy").open("r+b") as file:
            file.seek(-40 * 6, os.SEEK_END)
            file.write(images(40, seed=1).tobytes())

    def reopened(self) -> LocalSource:
        return load(self.folder)


class ClassFolders:
    """Rows in files, some of which are replaced by others of the same size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for row, image in enumerate(images(40)):
            (folder / str(row % 4)).mkdir(exist_ok=True)
            np.save(folder / str(row % 4) / f"{row}.npy", image)
        self.source = load(folder)

    def change(self) -> None:
        for row, image in enumerate(images(8, seed=1)):
            np.save(self.folder / "new.npy", image)
            (self.folder / "new.npy").replace(self.folder / str(row % 4) / f"{row}.npy")

    def reopened(self) -> LocalSource:
        return load(self.folder)


@pytest.mark.parametrize("kind", [ArraysInMemory, MappedArrays, ClassFolders])
def test_rows_are_divided_once_and_anew_when_they_change(
    kind: type[ArraysInMemory | MappedArrays | ClassFolders], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisions = Mock(wraps=is_held_out)
    monkeypatch.setattr(samples, "is_held_out", divisions)
    parts: tuple[Literal["train", "held-out"], ...] = ("train", "held-out")
    manifests = [
        msgspec.structs.replace(
            tiny.make_bundle().manifest, v=HELD_OUT, data=SPEC, split=Split(share=0.3, seed=3, part=part)
        )
        for part in parts
    ]
    data = kind(tmp_path)

    def rows_of(source: LocalSource) -> list[list[bytes]]:
        fits = [fit_rows(source, manifest) for manifest in manifests]
        return [[row.tobytes() for row in fit.rows(np.arange(len(fit)))] for fit in fits]

    before = rows_of(data.source)
    assert rows_of(data.source) == before
    assert divisions.call_count == 1

    data.change()
    after = rows_of(data.source)
    assert divisions.call_count == 2
    assert after != before and after == rows_of(data.reopened())
    assert rows_of(data.source) == after
    assert divisions.call_count == 3, "the source that was opened again needed one more"
    other = msgspec.structs.replace(manifests[0], split=Split(share=0.3, seed=4, part="train"))
    assert fit_rows(data.source, other).rows(np.arange(3)).shape == (3, 2, 3)
    assert divisions.call_count == 4


def test_a_device_whose_rows_are_all_in_the_other_part_says_so() -> None:
    source = LocalData(images(1), np.zeros(1, np.int64), "one row")
    (kept,) = is_held_out(source.fitted(SPEC), 0.5, 0)
    part = "train" if kept else "held-out"
    bundle = tiny.make_bundle()
    manifest = msgspec.structs.replace(
        bundle.manifest, v=HELD_OUT, data=SPEC, split=Split(share=0.5, seed=0, part=part)
    )
    with pytest.raises(DataError) as caught:
        fit_rows(source, manifest)
    assert caught.value.details["rows"] == 1


def test_a_manifest_with_a_split_has_a_version_that_older_devices_refuse() -> None:
    manifest = tiny.make_bundle().manifest
    split = Split(share=0.2, seed=0, part="train")
    assert b"split" not in encode_manifest(manifest)
    sound = msgspec.structs.replace(manifest, v=HELD_OUT, split=split)
    assert decode_manifest(encode_manifest(sound)) == sound
    for wrong in (
        msgspec.structs.replace(manifest, split=split),
        msgspec.structs.replace(manifest, v=HELD_OUT),
        msgspec.structs.replace(sound, split=msgspec.structs.replace(split, share=1.5)),
    ):
        with pytest.raises(BundleError):
            decode_manifest(encode_manifest(wrong))
