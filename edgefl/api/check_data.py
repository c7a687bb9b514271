"""Check of a device's data against a bundle, and samples to check a model with. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np

from edgefl.api.bundle import Bundle
from edgefl.api.progress import reporting
from edgefl.config import DataTable, parse
from edgefl.data import photos
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.data.tables import is_table
from edgefl.errors import ConfigError
from edgefl.setup.data import data_table, open_data
from edgefl.wire.tensors import Array
from edgefl_device.config import Source
from edgefl_device.data.check import DataReport, check
from edgefl_device.data.samples import LocalData
from edgefl_device.data.sources import load
from edgefl_device.engine import open_engine
from edgefl_device.round.executor import LoadedBundleParts
from edgefl_device.round.offline import MemoryBlobs


def check_data(data: str | Path | Source, bundle: Bundle | str | Path) -> DataReport:
    """Check the data of a device against a bundle, row by row. Unsuitable data raise no error; the report describes them.

    Args:
        data: a file or a folder of samples, or a function that returns them (:class:`edgefl.Agent`).
        bundle: a bundle, or its file.

    Returns:
        Report with ``fits``, the number of ``rows`` that fit, and ``classes`` with their counts. ``inputs`` have
        dtype, shape and range as the model reads them. ``bad_rows`` and the first 20 ``problems`` describe rows that
        do not fit, ``unread`` the arrays and files that the model ignores. ``error`` is the reason why the data cannot
        be used at all.

    Raises:
        BundleError: the bundle cannot be read.
        ConfigError: a library that reads the data is not installed.
    """
    read = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    blobs = MemoryBlobs(dict(read.contents.blobs))
    parts = LoadedBundleParts(open_engine(read.format), read.manifest, blobs)
    with reporting("reading the data"):
        return check(Path(data) if isinstance(data, str) else data, read.manifest, parts)


def samples_of(data: str | Path, label: str | None = None) -> Dataset:
    """Return the samples for `edgefl check --data` as a dataset.

    Args:
        data: a dataset's name, its file, or a file or folder of a device. The first row of its arrays serves
            as the test set.
        label: column of a CSV or JSONL file that holds the classes; default: `label`.

    Raises:
        DataError: The data do not exist or are damaged.
        ConfigError: There is no such dataset, or the files need the settings of a federation.
    """
    if _is_device_data(Path(data)):
        return _load_device_data(Path(data))
    table = data_table(data) | ({} if label is None else {"label": label})
    return open_data(parse({"data": table}, source="argument `data`"))


def _is_device_data(path: Path) -> bool:
    """Return True if ``path`` exists and is a device's data: a folder, or a file that is no table and has no test set."""
    if not path.exists() or is_table(path):
        return False
    if path.is_dir():
        return True
    try:
        with ZipFile(path) as archive:
            return "test_x.npy" not in archive.namelist()
    except (OSError, BadZipFile):
        return True  # whose reader says what is wrong with it


def _load_device_data(path: Path) -> Dataset:
    """Return the data of a device as a dataset. Of arrays, the first row is the test set; of photos, a fifth.

    Raises:
        ConfigError: the files need the settings of a federation.
    """
    local = load(path)
    if not isinstance(local, LocalData) and path.is_dir():
        return photos.load(path, DataTable().size)
    if not isinstance(local, LocalData):
        raise ConfigError(
            f"argument `data`: {path} has files that a federation has to explain: give photos in a folder for each "
            "class, or arrays, an .npz with x and y",
            argument="data",
        )
    x, y = np.asarray(local.x), np.asarray(local.y)
    tokens = x.dtype.kind in "iu" and x.dtype != np.uint8
    others = {
        name: OtherInput(np.asarray(rows), np.asarray(rows[:1]), _below(rows))
        for name, rows in local.others.items()
        if rows.shape[:1] == x.shape[:1]
    }
    below = _below(x) if tokens else 0
    return Dataset.of(x, y, x[:1], y[:1], name=str(path), below=below, others=others)


def _below(rows: Array) -> int:
    return int(rows.max()) + 1 if rows.dtype.kind in "iu" else 0
