"""Datasets by name, and the search for their files.

``load("auto")`` needs no network: it loads Fashion-MNIST if its files are found (or may be downloaded), else the
handwritten digits ``digits.csv.gz`` next to this module. These are the test half of E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (CC BY 4.0), as scikit-learn ships it.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgefl.data import cifar10, idx
from edgefl.data.dataset import Dataset
from edgefl.data.download import Progress
from edgefl.data.idx import FASHION_MNIST, MNIST, IdxSource
from edgefl.errors import ConfigError, DataError
from edgefl.wire import folders

NAMES = ("auto", "fashion_mnist", "mnist", "cifar10", "cifar10_jpeg", "digits", "random")
_IDX: Mapping[str, IdxSource] = {"fashion_mnist": FASHION_MNIST, "mnist": MNIST}
DIGITS = Path(__file__).with_name("digits.csv.gz")
_DIGITS_TRAIN = 1437


def load(
    name: str = "auto",
    directory: Path | None = None,
    *,
    download: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Load a dataset by name.

    Args:
        name: One of :data:`NAMES`.
        directory: Only folder to search for files. None: the folder in the environment variable EDGEFL_DATA, then the
            download folder ``~/.cache/edgefl``.
        download: Download missing files.
        progress: Called with the progress of the download. None: print it.

    Raises:
        DataError: The name is unknown, no folder has the files, the download failed, or the files are damaged.
    """
    if name == "auto":
        return _load_auto(directory, download=download, progress=progress)
    if name == "digits":
        return digits()
    if name == "random":
        return random_images()
    if name == "cifar10":
        target = directory or download_folder()
        return cifar10.load(places(directory), target, download=download, progress=progress)
    if name == "cifar10_jpeg":
        return cifar10.load_jpeg(places(directory))
    if name not in _IDX:
        raise DataError(f"no dataset {name!r}; there are: {', '.join(NAMES)}", name=name)
    return _load(_IDX[name], directory, download=download, progress=progress)


def places(directory: Path | None) -> tuple[Path, ...]:
    """Return the folders to search for files, in order.

    Args:
        directory: Only folder to search. None: the folder in EDGEFL_DATA, then the download folder.
    """
    if directory is not None:
        return (directory,)
    named = os.environ.get("EDGEFL_DATA", "").strip()
    found = [Path(named)] if named else []
    with suppress(ConfigError):  # without a home nothing was downloaded
        found.append(download_folder())
    return tuple(found)


def download_folder() -> Path:
    """Return the folder for downloaded files, ``edgefl`` in the user's cache folder.

    Raises:
        ConfigError: There is no home folder.
    """
    return folders.cache("downloads", "EDGEFL_DATA to the folder of the data")


def _load_auto(directory: Path | None, *, download: bool, progress: Progress | None) -> Dataset:
    """Load Fashion-MNIST; if that fails and ``directory`` is None, load the digits of scikit-learn.

    Raises:
        DataError: Fashion-MNIST is not in the named ``directory``.
    """
    try:
        return _load(FASHION_MNIST, directory, download=download, progress=progress)
    except DataError as error:
        # A folder that somebody named and that does not hold the data is a mistake, not a reason for other data.
        if directory is not None:
            raise
        if download:
            print(f"{error.message}. Using scikit-learn's digits instead.", file=sys.stderr)
        return digits()


def _load(source: IdxSource, directory: Path | None, *, download: bool, progress: Progress | None) -> Dataset:
    """Load the dataset ``source`` from the first folder that has its files, or from the network if ``download`` is true.

    Raises:
        DataError: No folder has the files, the download failed, or the files are damaged.
    """
    for place in places(directory):
        if files := idx.find(source, place):
            return idx.read(source, files)
    if not download:
        searched = ", ".join(str(place) for place in places(directory)) or "no folder"
        raise DataError(
            f"{source.name} was not found in {searched}: name the folder of its four idx files with `data` or "
            "EDGEFL_DATA, or allow the download (data.download = true)",
            dataset=source.name,
            searched=searched,
        )
    target = directory or download_folder()
    idx.download(source, target, progress)
    return idx.read(source, idx.find(source, target) or {})


def digits() -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits, 8x8 with 17 grey levels: always the same 1,437 for training and
    360 for testing.

    They are part of this package.

    Raises:
        DataError: The file of this package is damaged.
    """
    rows = _digits_table()
    x, y = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1]
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    mean, deviation = 4.884, 6.017
    return Dataset(
        name="scikit-learn digits (8x8)",
        train_x=x[train],
        train_y=y[train],
        test_x=x[test],
        test_y=y[test],
        scale=1.0 / deviation,
        shift=-mean / deviation,
        classes=10,
        top=16,
    )


def _digits_table() -> npt.NDArray[np.int64]:
    """Return one row per digit: 64 grey levels and the class.

    Raises:
        DataError: The file of this package is damaged.
    """
    try:
        return np.loadtxt(DIGITS, delimiter=",", dtype=np.int64).reshape(-1, 65)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{DIGITS} cannot be read: {error}", path=str(DIGITS)) from error


def random_images() -> Dataset:
    """Return random pixels in CIFAR-10's shape with random labels, for benchmarks in which only sizes matter."""
    rng, samples = np.random.default_rng(0), 8192
    x = rng.integers(0, 256, (samples, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 10, samples)
    held_out = samples // 8
    return Dataset(
        name="random images (3x32x32)",
        train_x=x[held_out:],
        train_y=y[held_out:],
        test_x=x[:held_out],
        test_y=y[:held_out],
        scale=2.0 / 255.0,
        shift=-1.0,
        classes=10,
    )
