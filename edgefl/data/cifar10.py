"""CIFAR-10: the published images, the first images of it, or all images compressed as JPEG."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Array, Dataset
from edgefl.data.download import Progress, fetch
from edgefl.errors import DataError

NAME, JPEG_NAME = "CIFAR-10", "CIFAR-10 (JPEG q75)"
URLS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE, MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar10"
BATCHES = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
WHOLE = "cifar10.npz"
SUBSET = "exact_subset_4k_1k.npz"
JPEG = ("jpeg_pack_train.npz", "jpeg_pack_test.npz")
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
# One mean and deviation for all channels: a manifest carries one scale and one shift.
_MEAN, _DEVIATION = 0.4734, 0.2516

_Part = tuple[Array, Array]
"""Images, uint8 [n, 3, 32, 32], and their class numbers, int64 [n]."""


def load(
    places: Sequence[Path], target: Path, *, download: bool = False, progress: Progress | None = None
) -> Dataset:
    """Load CIFAR-10 with exact pixels.

    Looks in each folder for the published binary version (folder or archive) or ``cifar10.npz`` with ``x_train``,
    ``y_train``, ``x_test`` and ``y_test`` (channels last). If no folder has it, uses the first 4,000 training and 1,000
    test images, if those are found; the name of the dataset then contains these numbers.

    Args:
        places: Folders to search, each together with its subfolder ``cifar10``.
        target: Folder for the downloaded archive.
        download: Download the archive if nothing is found.
        progress: Called with the progress of the download. None: print it.

    Raises:
        DataError: No folder has the files, the download failed, or the files are damaged.
    """
    folders = [folder for place in places for folder in (place / FOLDER, place)]
    for folder in folders:
        if found := _load_published(folder):
            return found
    if download:
        remedy = f"Put it into {target / FOLDER}, or name its folder with `data` or EDGEFL_DATA"
        fetch(URLS, target / FOLDER / ARCHIVE, MD5, of=NAME, remedy=remedy, progress=progress)
        return _read_archive(target / FOLDER / ARCHIVE)
    for folder in folders:
        if (folder / SUBSET).is_file():
            return _read_npz(folder / SUBSET)
    raise _missing_error(
        NAME,
        f"{ARCHIVE}, {BATCHES}, {WHOLE} or {SUBSET}",
        places,
        ", or allow the download (data.download = true)",
    )


def load_jpeg(places: Sequence[Path]) -> Dataset:
    """Load all images of CIFAR-10 as JPEG of quality 75, from ``jpeg_pack_train.npz`` and ``jpeg_pack_test.npz``.

    The files contain ``jpeg`` (uint8, the concatenated JPEG files), ``offset`` (int [n + 1]) and ``y``. Use them to
    compare methods with each other, not with published results. Needs Pillow.

    Args:
        places: Folders to search, each together with its subfolder ``cifar10``.

    Raises:
        DataError: No folder has the files, they are damaged, or Pillow is not installed.
    """
    for place in places:
        for folder in (place / FOLDER, place):
            train, test = (folder / name for name in JPEG)
            if train.is_file() and test.is_file():
                return _dataset(
                    JPEG_NAME, *(_unpack(pack, pack.stat().st_mtime_ns) for pack in (train, test))
                )
    raise _missing_error(JPEG_NAME, " and ".join(JPEG), places, ", or take cifar10, which can be downloaded")


def _load_published(folder: Path) -> Dataset | None:
    """Load a folder's complete copy of the dataset. Return None if the folder has none."""
    if (folder / BATCHES).is_dir():
        return _read_folder(folder / BATCHES)
    if (folder / ARCHIVE).is_file():
        return _read_archive(folder / ARCHIVE)
    if (folder / WHOLE).is_file():
        return _read_npz(folder / WHOLE)
    return None


def _read_folder(folder: Path) -> Dataset:
    try:
        return _read_records({name: (folder / name).read_bytes() for name in (*TRAIN, TEST)}, folder)
    except OSError as error:
        raise _damage_error(folder, error) from error


def _read_archive(path: Path) -> Dataset:
    try:
        with tarfile.open(path) as archive:
            found = {
                member.name.rsplit("/", 1)[-1]: file.read()
                for member in archive
                if (file := archive.extractfile(member)) is not None
            }
    except (OSError, EOFError, tarfile.TarError) as error:
        raise _damage_error(path, error) from error
    return _read_records(found, path)


def _read_records(files: dict[str, bytes], where: Path) -> Dataset:
    """Return the dataset of the published binary files.

    A record of 3,073 bytes has the class and the red, green and blue values of an image, a byte each.

    Args:
        files: Content of each file, by name.
        where: Folder or archive of the files, for errors.

    Raises:
        DataError: A file is missing, or its size is not a multiple of a record.
    """
    parts = []
    for name in (*TRAIN, TEST):
        data = files.get(name, b"")
        if not data or len(data) % _RECORD:
            raise _damage_error(where, f"{name} has {len(data):,} bytes, which are no records of {_RECORD:,}")
        records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
        parts.append((records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].astype(np.int64)))
    images, labels = zip(*parts[:-1], strict=True)
    return _dataset(NAME, (np.concatenate(images), np.concatenate(labels)), parts[-1])


def _read_npz(path: Path) -> Dataset:
    arrays = _arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    parts = [
        (np.ascontiguousarray(arrays[f"x_{half}"].transpose(0, 3, 1, 2)), arrays[f"y_{half}"].reshape(-1))
        for half in ("train", "test")
    ]
    name = NAME
    if path.name == SUBSET:
        train, test = (len(labels) for _, labels in parts)
        name = f"{NAME} (exact subset: first {train:,} train and {test:,} test images)"
    return _dataset(name, *parts)


@lru_cache(maxsize=2)
def _unpack(path: Path, _changed: int) -> _Part:
    """Return (images, labels) of a JPEG pack: read-only uint8 [n, 3, 32, 32], and class numbers [n].

    The result is cached, as decoding takes seconds. ``_changed`` is the file's time of change, so that a new file is read.

    Raises:
        DataError: The file is damaged, or Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"{JPEG_NAME} needs Pillow: pip install 'edgefl-tiers[images]'") from error
    arrays = _arrays(path, ("jpeg", "offset", "y"))
    packed, offsets = arrays["jpeg"].tobytes(), arrays["offset"].tolist()
    images = np.empty((len(offsets) - 1, *_SHAPE), np.uint8)
    for number, (start, stop) in enumerate(pairwise(offsets)):
        try:
            with Image.open(io.BytesIO(packed[start:stop])) as image:
                images[number] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise _damage_error(path, f"image {number}: {error}") from error
    images.flags.writeable = False
    return images, arrays["y"].reshape(-1)


def _arrays(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise _damage_error(path, error) from error


def _dataset(name: str, train: _Part, test: _Part) -> Dataset:
    return Dataset(
        name=name,
        train_x=train[0],
        train_y=train[1].astype(np.int64),
        test_x=test[0],
        test_y=test[1].astype(np.int64),
        scale=1.0 / (255.0 * _DEVIATION),
        shift=-_MEAN / _DEVIATION,
        classes=10,
    )


def _damage_error(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read: {why}", path=str(path))


def _missing_error(name: str, files: str, places: Sequence[Path], more: str) -> DataError:
    """Return the DataError for a dataset that was not found in ``places``.

    Args:
        name: Name of the dataset.
        files: Names of the files, as text.
        places: Folders that were searched.
        more: End of the remedy.
    """
    searched = ", ".join(str(place) for place in places) or "no folder"
    return DataError(
        f"{name} was not found in {searched}: name the folder of {files} with `data` or EDGEFL_DATA{more}",
        dataset=name,
        searched=searched,
    )
