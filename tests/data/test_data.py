"""Datasets: found, downloaded and checked, damaged, or replaced by the digits; and the devices' files."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import edgefl
from edgefl.data import cifar10, datasets, idx, photos
from edgefl.data.dataset import Array, write_client
from edgefl.data.idx import FASHION_MNIST, IdxSource
from edgefl.setup.data import open_data
from tests.device_runtime.data.files import image, written
from tests.support.errors import DataError, refuses


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
    with refuses(DataError, file="train-images-idx3-ubyte.gz", problems=...):
        idx.download(source, tmp_path / "data", lambda *_: None)
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_without_network_and_files_the_message_says_what_to_do(tmp_path: Path) -> None:
    source = replace(FASHION_MNIST, urls=(f"{tmp_path.as_uri()}/nowhere/",))
    with refuses(DataError, file="train-images-idx3-ubyte.gz", problems=...):
        idx.download(source, tmp_path, lambda *_: None)
    with refuses(DataError, dataset="MNIST", searched=str(tmp_path)):
        datasets.load("mnist", tmp_path)
    with refuses(DataError, dataset="Fashion-MNIST", searched=str(tmp_path)):
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
    ("data", "details"),
    [
        (b"\0\0\x08\x01\0\0\0\x09abc", {"path": ..., "shape": (9,)}),
        (b"\x89PNG....", {"path": ..., "magic": "89504e47"}),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, data: bytes, details: dict[str, object]) -> None:
    plain, packed = tmp_path / "labels", tmp_path / "labels.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data)[:-6])
    with refuses(DataError, **details):
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
    with refuses(DataError, samples=2, labels=3):
        write_client(path, digits.train_x[:2], digits.train_y[:3])


# -- CIFAR-10 in each form that it is passed around in, written here in small and read again ---------------


def _records(images: Array, labels: Array) -> bytes:
    return np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(len(labels), -1)], 1).tobytes()


def _drawn(seed: int, count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, count)


def _archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{cifar10.BATCHES}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _published() -> tuple[dict[str, bytes], list[tuple[Array, Array]]]:
    parts = [_drawn(seed, 3) for seed in range(6)]
    return dict(zip((*cifar10.TRAIN, cifar10.TEST), (_records(*part) for part in parts), strict=True)), parts


def test_the_published_archive_and_its_folder_are_the_same(tmp_path: Path) -> None:
    files, parts = _published()
    (tmp_path / "a").mkdir()
    _archive(tmp_path / "a" / cifar10.ARCHIVE, files)
    (tmp_path / "b" / cifar10.FOLDER / cifar10.BATCHES).mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "b" / cifar10.FOLDER / cifar10.BATCHES / name).write_bytes(data)

    for folder in ("a", "b"):
        found = datasets.load("cifar10", tmp_path / folder)
        assert found.name == "CIFAR-10" and found.classes == 10
        assert np.array_equal(found.train_x, np.concatenate([images for images, _ in parts[:-1]]))
        assert np.array_equal(found.train_y, np.concatenate([labels for _, labels in parts[:-1]]))
        assert np.array_equal(found.test_x, parts[-1][0]) and np.array_equal(found.test_y, parts[-1][1])


def test_only_published_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "server"
    server.mkdir()
    files, _ = _published()
    _archive(server / cifar10.ARCHIVE, files)
    monkeypatch.setattr(cifar10, "URLS", (f"{server.as_uri()}/",))
    with refuses(DataError, file="cifar-10-binary.tar.gz", problems=...):
        datasets.load("cifar10", tmp_path / "data", download=True, progress=lambda *_: None)

    digest = hashlib.md5((server / cifar10.ARCHIVE).read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(cifar10, "MD5", digest)
    found = datasets.load("cifar10", tmp_path / "data", download=True, progress=lambda *_: None)
    assert len(found.train_y) == 15 and (tmp_path / "data" / "cifar10" / cifar10.ARCHIVE).is_file()


def test_a_part_of_it_says_so_and_gives_way_to_all_of_it(tmp_path: Path) -> None:
    (x, y), (test_x, test_y) = _drawn(0, 4), _drawn(1, 2)
    last = {"x_train": x.transpose(0, 2, 3, 1), "x_test": test_x.transpose(0, 2, 3, 1)}
    np.savez(tmp_path / cifar10.SUBSET, y_train=y, y_test=test_y, **last)
    found = datasets.load("cifar10", tmp_path)
    assert "exact subset: first 4 train and 2 test images" in found.name
    assert np.array_equal(found.train_x, x) and np.array_equal(found.test_x, test_x)

    np.savez(tmp_path / cifar10.WHOLE, y_train=y[:, None], y_test=test_y[:, None], **last)
    found = datasets.load("cifar10", tmp_path)
    assert found.name == "CIFAR-10" and np.array_equal(found.train_y, y)


def test_jpeg_is_a_dataset_of_its_own_name(tmp_path: Path) -> None:
    gradient = np.tile(np.linspace(0, 255, 32, dtype=np.uint8), (3, 32, 1))
    for name, count in zip(cifar10.JPEG, (3, 2), strict=True):
        packed = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(gradient.transpose(1, 2, 0)).save(file, "JPEG", quality=75)
            packed.append(file.getvalue())
        offset = np.cumsum([0, *map(len, packed)])
        jpeg = np.frombuffer(b"".join(packed), np.uint8)
        np.savez(tmp_path / name, jpeg=jpeg, offset=offset, y=np.arange(count))
    found = datasets.load("cifar10_jpeg", tmp_path)

    assert found.name == "CIFAR-10 (JPEG q75)" and found.train_y.tolist() == [0, 1, 2]
    assert np.abs(found.test_x.astype(int) - gradient).max() < 16
    with refuses(DataError, dataset="CIFAR-10", searched=str(tmp_path)):
        datasets.load("cifar10", tmp_path)

    np.savez(tmp_path / cifar10.JPEG[1], jpeg=np.zeros(9, np.uint8), offset=np.array([0, 9]), y=np.zeros(1))
    with pytest.raises(DataError, match="image 0"):
        datasets.load("cifar10_jpeg", tmp_path)


def test_what_is_missing_or_damaged_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{tmp_path}.*cifar-10-binary.tar.gz.*EDGEFL_DATA, or allow the download"
    ):
        datasets.load("cifar10", tmp_path)
    with pytest.raises(DataError, match=r"jpeg_pack_train\.npz and jpeg_pack_test\.npz"):
        datasets.load("cifar10_jpeg", tmp_path)
    (tmp_path / cifar10.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz cannot be read"):
        datasets.load("cifar10", tmp_path)
    files, _ = _published()
    _archive(tmp_path / cifar10.ARCHIVE, files | {"data_batch_3.bin": b"short"})
    with pytest.raises(DataError, match=r"data_batch_3.bin has 5 bytes"):
        datasets.load("cifar10", tmp_path)


# -- folders of photos as the data of a federation ---------------------------------------------------------


COLOURS = {"cafe\u0301": 40, "dog": 200}


def folder_of(root: Path, count: int = 5) -> Path:
    for name, level in COLOURS.items():
        for number in range(count):
            image(root / name / f"{number}.png", np.full((6 + number, 5, 3), level, np.uint8))
        written(root / name / "Thumbs.db", b"no photo")
        written(root / name / "._0.png", b"no photo")
    written(root / ".DS_Store", b"no photo")
    return root


def test_a_fifth_of_each_class_is_for_tests(tmp_path: Path) -> None:
    federation = edgefl.federation("cnn", data=str(folder_of(tmp_path / "photos")))
    found = open_data(federation)

    assert (found.train_x.shape, found.test_x.shape) == ((8, 3, 64, 64), (2, 3, 64, 64))
    assert found.names == ("caf\u00e9", "dog")
    for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y)):
        np.testing.assert_array_equal(x[:, 0, 0, 0], np.array([40, 200])[y])


def test_folders_for_training_and_tests_are_taken_as_they_are(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", 3)
    folder_of(tmp_path / "val", 1)
    found = photos.load(tmp_path, 8)

    assert (len(found.train_x), len(found.test_x)) == (6, 2)


def test_a_photo_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    written(folder_of(tmp_path) / "dog" / "x.jpg", b"no photo")

    with pytest.raises(DataError, match=r"dog/x\.jpg: is no image that can be read"):
        photos.load(tmp_path, 8)


@pytest.mark.parametrize(
    ("name", "problem"), [("x.png", "in no class's folder"), ("cat/", "a class without photos")]
)
def test_what_a_device_would_refuse_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    found = folder_of(tmp_path) / name
    found.mkdir() if name.endswith("/") else written(found, b"")

    with pytest.raises(DataError, match=problem):
        photos.load(tmp_path, 8)


@pytest.mark.parametrize("classes", [0, 1])
def test_a_folder_without_classes_says_what_is_expected(tmp_path: Path, classes: int) -> None:
    for number in range(classes):
        image(tmp_path / str(number) / "a.png", np.zeros((4, 4, 3), np.uint8))

    with refuses(DataError, path=str(tmp_path), found=classes):
        photos.load(tmp_path, 8)
