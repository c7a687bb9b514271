"""Windows over sensor series: each file is a recording, its rows are in the order of time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from device_runtime.data.problems import BadRow
from device_runtime.data.reading import Entry, Reading, Samples
from device_runtime.data.rows import DecodedRows
from device_runtime.data.tables import field, numbers, records, scaled
from edgefl.wire.bundle.readers import Series
from edgefl.wire.errors import DataError
from edgefl.wire.tensors import Array


def read(reading: Reading, entries: tuple[Entry, ...]) -> Samples:
    """No window has a bad row in it, and none lies in two recordings. Recordings stay in memory once, windows are cut out
    when they are asked for."""
    reader = reading.reader
    assert isinstance(reader, Series)
    width, window = len(reader.columns), reader.window
    reading.check_shape((window, width) if reader.channels_last else (width, window))
    if reading.label.shape:
        raise DataError(
            f"{reading.source}: a window has one label, the model takes {reading.label.shape} of each sample: give arrays "
            "(.npz)"
        )
    places: list[tuple[Array, int]] = []
    labels: list[float] = []
    for rows, own, good in _recordings(reading, reader, entries):
        for start in range(0, len(rows) - window + 1, reader.step):
            part = slice(start, start + window)
            if good[part].all():
                places.append((rows, start))
                labels.append(_most(own[part]))
    if not places and not reading.problems.count:
        raise DataError(
            f"{reading.source}: no recording has the {window} rows of a window of this federation",
            window=window,
        )

    def cut(place: tuple[Array, int]) -> Array:
        rows, start = place
        found = rows[start : start + window]
        return found if reader.channels_last else np.ascontiguousarray(found.T)

    return Samples(
        DecodedRows(places, cut), np.array(labels, np.float64 if reading.label.floats else np.int64)
    )


def _recordings(
    reading: Reading, reader: Series, entries: tuple[Entry, ...]
) -> Iterator[tuple[Array, Array, Array]]:
    """Of each file its rows (n, columns), their labels (n,), and which of them are good (n,)."""
    classes = {} if reader.label else dict(reading.by_folder(entries))
    needed = [*reader.columns, *([reader.label] if reader.label else [])]
    for entry in entries:
        if not reader.label and entry not in classes:
            continue
        rows, own = array("d"), array("d")
        good: list[bool] = []
        for line, record in records(entry.path, needed):
            try:
                row = numbers(record, reader.columns, reading.spec.dtype, reading.spec.below)
                label = reading.number(field(record, reader.label)) if reader.label else classes[entry]
            except BadRow as bad:
                reading.problems.add(f"{entry.path}, line {line}", str(bad))
                row, label = [0.0] * len(reader.columns), 0
                good.append(False)
            else:
                good.append(True)
            rows.extend(row)
            own.append(label)
        whole = np.array(rows, np.float64).reshape(-1, len(reader.columns))
        yield scaled(whole, reader).astype(reading.spec.dtype), np.array(own), np.array(good, bool)


def _most(labels: Array) -> float:
    """The label that most rows have; of equally many the one that comes first."""
    values, first, counts = np.unique(labels, return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return float(values[best[np.argmin(first[best])]])
