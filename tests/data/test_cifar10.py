"""CIFAR-10 in each form that it is passed around in, written here in small and read again."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl.data import cifar10, datasets
from edgefl.data.dataset import Array
from edgefl.errors import DataError


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
    with pytest.raises(DataError, match=r"MD5.*Put it into"):
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
    with pytest.raises(DataError, match="CIFAR-10 was not found"):
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
