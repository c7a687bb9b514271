"""Windows over sensor series: each file is a recording, its rows are in the order of time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.readers import SeriesReader
from edgefl.wire.records import BadRow, Checks, field, is_number, numbers, records, scaled
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples
from edgefl_device.data.samples import DecodedRows
from edgefl_device.data.spool import Spool, released
from edgefl_device.data.tables import TOGETHER


def read(reading: Reading, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """No window has a bad row in it, and none lies in two recordings. Recordings are kept once, on the disk where they are
    long, and windows are cut out on access."""
    reader = reading.reader
    assert isinstance(reader, SeriesReader)
    width, window = len(reader.columns), reader.window
    reading.check_shape((window, width) if reader.channels_last else (width, window))
    if reading.label.shape:
        raise DataError(
            f"{reading.source}: a window has one label, the model takes {reading.label.shape} of each sample: give arrays "
            "(.npz)"
        )
    rows, places, labels = Spool(reading.spec.dtype, (width,)), array("q"), array("d")
    for begin, own, good in _recordings(reading, reader, entries, rows):
        for start in range(0, len(own) - window + 1, reader.step):
            part = slice(start, start + window)
            if good[part].all():
                places.append(begin + start)
                labels.append(_most(own[part]))
    if not places and not reading.problems.count:
        raise DataError(
            f"{reading.source}: no recording has the {window} rows of a window of this federation",
            window=window,
        )

    whole = rows.array()

    def cut(start: int) -> Array:
        found = whole[start : start + window].copy()
        released(whole)
        return found if reader.channels_last else np.ascontiguousarray(found.T)

    return ReadSamples(
        DecodedRows(places, cut), np.array(labels, np.float64 if reading.label.floats else np.int64)
    )


def _recordings(
    reading: Reading, reader: SeriesReader, entries: tuple[FileEntry, ...], kept: Spool
) -> Iterator[tuple[int, Array, Array]]:
    """Append each file's rows to ``kept``; yield their beginning, their labels (n,), and the good ones (n,)."""
    classes = {} if reader.label else dict(reading.by_folder(entries))
    checks: Checks = dict.fromkeys(reader.columns, is_number)
    if reader.label:
        checks = {**checks, reader.label: reading.is_label}
    for entry in entries:
        if not reader.label and entry not in classes:
            continue
        begin, held, own = len(kept), array("d"), array("d")
        good = bytearray()
        for line, record in records(entry.path, checks):
            try:
                row = numbers(record, reader.columns, reading.spec.dtype, reading.spec.below)
                label = reading.number(field(record, reader.label)) if reader.label else classes[entry]
            except BadRow as bad:
                reading.problems.add(f"{entry.path}, line {line}", str(bad))
                row, label = [0.0] * len(reader.columns), 0
                good.append(False)
            else:
                good.append(True)
            held.extend(row)
            own.append(label)
            if len(own) % TOGETHER == 0:
                held = _moved(held, reader, kept)
        _moved(held, reader, kept)
        yield begin, np.array(own), np.array(good, bool)


def _moved(held: array[float], reader: SeriesReader, kept: Spool) -> array[float]:
    """Move the held rows to ``kept``; return an empty array."""
    kept.extend(scaled(np.array(held, np.float64).reshape(-1, len(reader.columns)), reader))
    return array("d")


def _most(labels: Array) -> float:
    """Return the label that most rows have; of equally many the one that comes first."""
    values, first, counts = np.unique(labels, return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return float(values[best[np.argmin(first[best])]])
