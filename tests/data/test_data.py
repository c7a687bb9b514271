"""Datasets: found, downloaded and checked, damaged, or replaced by the digits; and the devices' files."""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgefl.data import datasets, idx
from edgefl.data.dataset import Array, write_client
from edgefl.data.idx import FASHION_MNIST, IdxSource
from edgefl.errors import DataError


def _idx_bytes(array: Array) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def published(tmp_path: Path) -> tuple[IdxSource, Path]:
    """A tiny dataset of the MNIST family on a file:// server, with its checksums."""
    rng = np.random.default_rng(0)
    server = tmp_path / "server"
    server.mkdir()
    md5 = {}
    for name, shape, top in (
        ("train-images-idx3-ubyte.gz", (12, 4, 4), 256),
        ("train-labels-idx1-ubyte.gz", (12,), 10),
        ("t10k-images-idx3-ubyte.gz", (5, 4, 4), 256),
        ("t10k-labels-idx1-ubyte.gz", (5,), 10),
    ):
        data = gzip.compress(_idx_bytes(rng.integers(0, top, shape, dtype=np.uint8)))
        (server / name).write_bytes(data)
        md5[name] = hashlib.md5(data, usedforsecurity=False).hexdigest()
    source = replace(FASHION_MNIST, urls=(f"{tmp_path.as_uri()}/nowhere/", f"{server.as_uri()}/"), md5=md5)
    return source, server


def test_downloads_try_another_address_and_check(published: tuple[IdxSource, Path], tmp_path: Path) -> None:
    source, _ = published
    seen: list[str] = []
    idx.download(source, tmp_path / "data", lambda file, done, total: seen.append(file))
    dataset = idx.read(source, idx.find(source, tmp_path / "data") or {})
    assert dataset.train_x.shape == (12, 1, 4, 4) and dataset.test_y.shape == (5,)
    assert dataset.train_x.dtype == np.uint8 and dataset.train_y.dtype == np.int64
    assert set(seen) == set(source.md5)


def test_a_changed_file_is_refused_and_removed(published: tuple[IdxSource, Path], tmp_path: Path) -> None:
    source, server = published
    (server / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"MD5.*`data` or EDGEFL_DATA"):
        idx.download(source, tmp_path / "data", lambda *_: None)
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_without_network_and_files_the_message_says_what_to_do(tmp_path: Path) -> None:
    source = replace(FASHION_MNIST, urls=(f"{tmp_path.as_uri()}/nowhere/",))
    with pytest.raises(DataError, match="cannot download"):
        idx.download(source, tmp_path, lambda *_: None)
    with pytest.raises(DataError, match="allow the download"):
        datasets.load("mnist", tmp_path)
    with pytest.raises(DataError, match="was not found"):
        datasets.load("auto", tmp_path)


@pytest.mark.parametrize("gzipped", [True, False])
def test_files_are_found_in_folders(published: tuple[IdxSource, Path], tmp_path: Path, gzipped: bool) -> None:
    source, server = published
    target = tmp_path / "data" / ("fashion_mnist" if gzipped else "")
    target.mkdir(parents=True)
    for name in source.md5:
        data = (server / name).read_bytes()
        (target / (name if gzipped else name[:-3])).write_bytes(data if gzipped else gzip.decompress(data))
    assert len(datasets.load("auto", tmp_path / "data").train_y) == 12


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\x08\x01\0\0\0\x09abc", "announces"),
        (b"\x89PNG....", "not an idx file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    plain, packed = tmp_path / "labels", tmp_path / "labels.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data)[:-6])
    with pytest.raises(DataError, match=message):
        idx.read_idx(plain)
    with pytest.raises(DataError, match="cannot be read"):
        idx.read_idx(packed)


@pytest.mark.parametrize(
    ("named", "found"),
    [(None, ["/cache/edgefl"]), ("", ["/cache/edgefl"]), ("/data", ["/data", "/cache/edgefl"])],
)
def test_files_are_looked_for_where_the_user_said_and_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    if named is not None:
        monkeypatch.setenv("EDGEFL_DATA", named)
    assert datasets.places(None) == tuple(Path(place) for place in found)
    assert datasets.places(Path("/mine")) == (Path("/mine"),)


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # seconds to import, in every process that collects tests

    theirs, ours = load_digits(), datasets.digits()

    def rows(x: np.ndarray, y: np.ndarray) -> list[bytes]:
        return sorted(image.tobytes() + bytes([label]) for image, label in zip(x, y, strict=True))

    together = np.concatenate([ours.train_x, ours.test_x]), np.concatenate([ours.train_y, ours.test_y])
    assert rows(*together) == rows(theirs.images.astype(np.uint8), theirs.target)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:1000], lambda data: gzip.compress(b"1,2\n3,4\n"), None]
)
def test_digits_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes] | None
) -> None:
    file = tmp_path / "digits.csv.gz"
    if damage is not None:
        file.write_bytes(damage(datasets.DIGITS.read_bytes()))
    monkeypatch.setattr(datasets, "DIGITS", file)

    with pytest.raises(DataError, match=r"digits\.csv\.gz cannot be read"):
        datasets.digits()


def test_auto_falls_back_to_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "places", lambda directory: (tmp_path,))
    dataset = datasets.load("auto")
    assert dataset.name == "scikit-learn digits (8x8)"
    assert (dataset.train_x.shape, dataset.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert np.array_equal(dataset.test_y, datasets.digits().test_y)
    assert set(np.unique(dataset.test_y)) == set(range(10))


def test_floats_are_normalised_and_limits_are_named() -> None:
    digits = datasets.digits()
    floats = digits.read(digits.train_x)
    assert floats.dtype == np.float32
    assert abs(floats.mean()) < 0.01 and abs(floats.std() - 1) < 0.01
    small = digits.limited(100, 50, seed=1)
    assert (len(small.train_y), len(small.test_y)) == (100, 50)
    assert small.name == "scikit-learn digits (8x8), 100 train and 50 test samples"
    assert digits.limited() is digits


def test_unknown_names_are_refused() -> None:
    with pytest.raises(DataError, match="fashion_mnist, mnist, cifar10, cifar10_jpeg, digits"):
        datasets.load("imagenet")


def test_a_device_s_file_round_trips(tmp_path: Path) -> None:
    digits = datasets.digits()
    path = tmp_path / "devices" / "weak-1.npz"
    write_client(path, digits.train_x[:7], digits.train_y[:7])
    with np.load(path) as archive:
        assert sorted(archive) == ["x", "y"]
        assert np.array_equal(archive["x"], digits.train_x[:7]) and archive["y"].dtype == np.int64
    assert [file.name for file in path.parent.iterdir()] == ["weak-1.npz"]
    with pytest.raises(DataError, match="as many samples as labels"):
        write_client(path, digits.train_x[:2], digits.train_y[:3])
