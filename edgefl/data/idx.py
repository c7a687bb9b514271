"""Datasets of the MNIST family, in idx files: search, download and loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.download import Progress, fetch, md5_of
from edgefl.errors import DataError
from edgefl.wire.array_files import read_idx


@dataclass(frozen=True)
class IdxSource:
    """Published dataset of the MNIST family, with the places to download its four files.

    Attributes:
        name: Name of the dataset.
        folder: Subfolder for its files.
        urls: URLs of folders that contain the files.
        md5: MD5 of each file by its published name.
        mean: Mean of the training pixels divided by 255.
        deviation: Standard deviation of the training pixels divided by 255.
        classes: Number of classes.
    """

    name: str
    folder: str
    urls: tuple[str, ...]
    md5: Mapping[str, str]
    # Mean and standard deviation of the training pixels, as fractions of 255.
    mean: float
    deviation: float
    classes: int = 10


FASHION_MNIST = IdxSource(
    name="Fashion-MNIST",
    folder="fashion_mnist",
    urls=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    md5={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    mean=0.2860,
    deviation=0.3530,
)

MNIST = IdxSource(
    name="MNIST",
    folder="mnist",
    urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    md5={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    mean=0.1307,
    deviation=0.3081,
)


def find(source: IdxSource, folder: Path) -> dict[str, Path] | None:
    """Return the paths of the dataset's four files, by their published names, or None if one is missing.

    Args:
        source: Dataset.
        folder: Folder to search, together with its subfolder ``source.folder``. Files may be gzipped or not.
    """
    # The dataset's own folder first: MNIST and Fashion-MNIST have the same file names.
    for place in (folder / source.folder, folder):
        files = {name: _either(place, name) for name in source.md5}
        if all(files.values()):
            return {name: path for name, path in files.items() if path is not None}
    return None


def _either(place: Path, name: str) -> Path | None:
    """Return the path of the file ``name`` in ``place``, or of its unpacked copy without ``.gz``, or None."""
    return next((path for path in (place / name, place / name.removesuffix(".gz")) if path.is_file()), None)


def read(source: IdxSource, files: Mapping[str, Path]) -> Dataset:
    """Load the dataset from its files.

    Args:
        source: Dataset.
        files: Path of each of the four files, by its published name (:func:`find`).

    Raises:
        DataError: A file is damaged, or belongs to another dataset of the family.
    """
    for path in files.values():
        _check_identity(source, path)
    parts = {name: read_idx(path) for name, path in files.items()}
    deviation = 255.0 * source.deviation
    return Dataset(
        name=source.name,
        train_x=parts["train-images-idx3-ubyte.gz"][:, None],
        train_y=parts["train-labels-idx1-ubyte.gz"].astype(np.int64),
        test_x=parts["t10k-images-idx3-ubyte.gz"][:, None],
        test_y=parts["t10k-labels-idx1-ubyte.gz"].astype(np.int64),
        scale=1.0 / deviation,
        shift=-source.mean / source.deviation,
        classes=source.classes,
    )


def _check_identity(source: IdxSource, path: Path) -> None:
    """Raise DataError if a gzipped file belongs to another dataset. MNIST and Fashion-MNIST have the same file names."""
    if path.suffix != ".gz":
        return
    digest = md5_of(path)
    for other in (FASHION_MNIST, MNIST):
        if other.name != source.name and other.md5.get(path.name) == digest:
            raise DataError(f"{path} is a file of {other.name}, not of {source.name}", path=str(path))


def download(source: IdxSource, folder: Path, progress: Progress | None = None) -> None:
    """Download the missing files of the dataset into ``folder/<source.folder>``. Each is verified by its MD5.

    Args:
        source: Dataset.
        folder: Parent folder.
        progress: Called with file name, bytes so far and bytes in all (0: unknown). None: print the progress.

    Raises:
        DataError: No URL has a file with its published MD5. The message has the remedy.
    """
    for name, md5 in source.md5.items():
        target = folder / source.folder / name
        if not target.is_file():
            remedy = f"Put the four official .gz files into {target.parent} or name their folder with `data` or EDGEFL_DATA"
            fetch(source.urls, target, md5, of=source.name, remedy=remedy, progress=progress)
