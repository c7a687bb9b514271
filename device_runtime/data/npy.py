"""A folder of .npy samples for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from device_runtime.data.problems import BadRow
from device_runtime.data.reading import Entry, Reading, Samples
from device_runtime.data.samples import LocalData
from edgefl.wire.tensors import Array


def read(reading: Reading, entries: tuple[Entry, ...]) -> Samples:
    samples: list[Array] = []
    labels: list[int] = []
    for entry, number in reading.by_folder(entries):
        try:
            samples.append(_sample(entry.path, reading.spec.shape))
            labels.append(number)
        except BadRow as bad:
            reading.problems.add(str(entry.path), str(bad))
    if not samples:
        return Samples(np.zeros((0, *reading.spec.shape)), np.zeros(0, np.int64))
    whole = LocalData(np.stack(samples), np.array(labels, np.int64), reading.source)
    whole.check()
    fitted = whole.fitted(reading.spec, reading.label)
    return Samples(fitted.x, fitted.y)


def _sample(path: Path, shape: tuple[int, ...]) -> Array:
    try:
        found: Array = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy raises unrelated types for damaged files
        raise BadRow(f"cannot be read: {error}") from error
    if shape not in (found.shape, (1, *found.shape)):
        raise BadRow(f"the sample has shape {found.shape}, the model takes {shape}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise BadRow("the sample has a value that is NaN or infinite")
    return found.reshape(shape)
