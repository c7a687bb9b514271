"""A folder of .npy samples for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.wire.array_files import native, unreadable
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.records import BadRow
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples
from edgefl_device.data.samples import as_read


def read(reading: Reading, entries: tuple[FileEntry, ...]) -> ReadSamples:
    return reading.decoded(reading.by_folder(entries), lambda path: _sample(path, reading.spec))


def _sample(path: Path, spec: DataSpec) -> Array:
    """Return a file's sample as the model reads it. Files may hold integers and floats; only integers are scaled."""
    try:
        found = native(np.load(path, allow_pickle=False))
    except Exception as error:  # numpy raises unrelated types for damaged files
        raise BadRow(f"cannot be read: {unreadable(error, '')}") from error
    if spec.shape not in (found.shape, (1, *found.shape)):
        raise BadRow(f"the sample has shape {found.shape}, the model takes {spec.shape}")
    if found.dtype.kind not in "iu" and found.dtype != np.dtype(spec.dtype):
        raise BadRow(f"the sample is {found.dtype}, the model takes {spec.dtype} or integers to be scaled")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise BadRow("the sample has a value that is NaN or infinite")
    if np.issubdtype(spec.dtype, np.integer):
        most = spec.below or int(np.iinfo(spec.dtype).max) + 1
        least = 0 if spec.below else int(np.iinfo(spec.dtype).min)
        if int(found.min()) < least or int(found.max()) >= most:
            raise BadRow(
                f"the sample has {int(found.min())} to {int(found.max())}, the model takes whole numbers from {least} to "
                f"{most - 1}"
            )
    return as_read(found.reshape(spec.shape), spec)
