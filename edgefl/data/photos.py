"""Loader of image datasets: a folder of photos for each class."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Array, Dataset
from edgefl.data.partition import hold_out
from edgefl.errors import DataError
from edgefl.wire.images import SUFFIXES, UNREAD, ImageError, import_pillow, read_pixels

_TESTS = ("test", "val", "valid", "validation")


def load(folder: Path, size: int, seed: int = 0) -> Dataset:
    """Load photos from a folder that has one subfolder per class, or such folders in ``train`` and ``test``.

    Pixels are uint8, (n, 3, size, size). A folder ``val``, ``valid`` or ``validation`` serves as ``test`` too.

    Args:
        folder: Folder. Hidden files, and files that are no images, are ignored.
        size: Width and height in pixels to which photos are stretched.
        seed: Seed of the choice of test photos, one fifth of each class, if there is no folder ``test``.

    Raises:
        DataError: A photo cannot be read or is in no class folder. Also if a class folder is empty or contains another
            class folder, or if there are too few photos or classes.
    """
    test_folder = next((folder / name for name in _TESTS if (folder / name).is_dir()), None)
    if test_folder is not None and (folder / "train").is_dir():
        train, test = _by_class(folder / "train"), _by_class(test_folder)
    else:
        train, test = hold_out(_by_class(folder), seed)
    names = tuple(train)
    if unknown := [name for name in test if name not in train]:
        raise DataError(
            f"{test_folder} has a class {unknown[0]!r} without training photos; found {', '.join(names)}"
        )
    train_x, train_y = _arrays([train[name] for name in names], size)
    test_x, test_y = _arrays([test.get(name, []) for name in names], size)
    return Dataset.of(train_x, train_y, test_x, test_y, name=folder.name, classes=len(names), names=names)


def _by_class(folder: Path) -> dict[str, list[Path]]:
    """Return the paths of the photos of each class, sorted, by the name of the class's folder.

    Raises:
        DataError: A photo is in no class folder, a class folder is empty or contains a folder of photos, or there are
            fewer than two classes.
    """
    found: dict[str, list[Path]] = {}
    for child in sorted(folder.iterdir()):
        if _is_photo(child) and not child.name.startswith("."):
            raise DataError(
                f"{child} is a photo in no class's folder: move it into one, or remove it", path=str(child)
            )
        if child.is_dir() and not child.name.startswith("."):
            inside = [path for path in sorted(child.iterdir()) if not path.name.startswith(".")]
            if nested := [path for path in inside if path.is_dir() and any(map(_is_photo, path.iterdir()))]:
                raise DataError(
                    f"{nested[0]} is a folder of photos inside of {child}: expected one folder for each class; move its "
                    "photos up, or name the folder whose folders are the classes",
                    path=str(nested[0]),
                    folder=str(child),
                )
            photos = [path for path in inside if _is_photo(path)]
            if not photos and folder.name not in _TESTS:
                raise DataError(f"{child} is a class without photos: add some, or remove it", path=str(child))
            if photos:
                found[unicodedata.normalize("NFC", child.name)] = photos
    if len(found) < 2:
        raise DataError(
            f"{folder} is no dataset: expected folders of photos ({', '.join(SUFFIXES)}), one for each of at least 2 "
            f"classes, found {len(found)}; name an .npz of `Dataset.save`, or such a folder",
            path=str(folder),
            found=len(found),
        )
    return found


def _is_photo(path: Path) -> bool:
    return path.suffix.lower() in (*SUFFIXES, *UNREAD) and not path.is_dir()


def _arrays(photos: Sequence[Sequence[Path]], size: int) -> tuple[Array, Array]:
    """Return (decoded photos, class numbers): uint8 (n, 3, size, size) and int64 (n,).

    Args:
        photos: Paths of the photos of each class, in the order of the class numbers.
        size: Width and height.

    Raises:
        DataError: A photo cannot be read.
    """
    pillow, rows = import_pillow(), []
    for path in (path for paths in photos for path in paths):
        try:
            rows.append(np.moveaxis(read_pixels(pillow, path, "RGB", (size, size)), 2, 0))
        except ImageError as error:
            raise DataError(f"{path}: {error}; repair or remove it", path=str(path)) from error
    labels = np.repeat(np.arange(len(photos)), [len(paths) for paths in photos])
    return np.array(rows, np.uint8).reshape(-1, 3, size, size), labels.astype(np.int64)
