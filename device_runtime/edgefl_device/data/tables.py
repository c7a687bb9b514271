"""Readers of tables (one sample a row) and of sensor series (one sample a window of successive rows)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import Input
from edgefl.wire.bundle.readers import SeriesSpec, TableSpec
from edgefl.wire.records import BadRow, Checks, field, is_number, numbers, records, rescale
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, ReadContext, ReadSamples
from edgefl_device.data.samples import DecodedRows
from edgefl_device.data.spool import Spool

TOGETHER = 4096
"""Rows that are kept as Python has them until they become arrays."""


def read_tables(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return one sample for each row of tables with the same columns, file after file.

    The bundle's reader names the columns, the label's column and the scaling. Rows that cannot be used are added to
    ``reading.problems``.

    Raises:
        DataError: The model takes samples of another shape, or bad rows are refused.
    """
    reader = reading.reader
    assert isinstance(reader, TableSpec)
    reading.check_shape((len(reader.columns),))
    columns = {each.name: _columns_of(reader, each) for each in reading.spec.others}
    numeric = [*reader.columns, *(name for names in columns.values() for name in names)]
    checks: Checks = {**dict.fromkeys(numeric, is_number), reader.label: reading.is_label}
    label_type = reading.label.dtype if reading.label.floats else "int64"
    spools = {"x": Spool(reading.spec.dtype, reading.spec.shape), "y": Spool(label_type)}
    spools |= {each.name: Spool(each.dtype, each.shape) for each in reading.spec.others}
    held = {name: array("d") for name in spools}

    def flush() -> None:
        for name, spool in spools.items():
            rows = np.array(held[name], np.float64)
            spool.extend(rescale(rows.reshape(-1, len(reader.columns)), reader) if name == "x" else rows)
            held[name] = array("d")

    for entry in entries:
        for line, record in records(entry.path, checks):
            try:
                row = numbers(record, reader.columns, reading.spec.dtype, reading.spec.below)
                beside = {
                    each.name: numbers(record, columns[each.name], each.dtype, each.below)
                    for each in reading.spec.others
                }
                label = reading.number(field(record, reader.label))
            except BadRow as bad:
                reading.problems.add(f"{entry.path}, line {line}", str(bad))
                continue
            for name, found in {"x": row, "y": [label], **beside}.items():
                held[name].extend(found)
            if len(held["y"]) == TOGETHER:
                flush()
    flush()
    arrays = {name: spool.array() for name, spool in spools.items()}
    return ReadSamples(arrays.pop("x"), arrays.pop("y"), arrays)


def _columns_of(reader: TableSpec, wanted: Input) -> tuple[str, ...]:
    columns = tuple(reader.others.get(wanted.name, (wanted.name,)))
    if len(columns) != int(np.prod(wanted.shape)):
        raise DataError(
            f"input {wanted.name!r} has shape {wanted.shape}, and the federation reads it of {len(columns)} columns: name "
            "as many in `others` of its reader",
            name=wanted.name,
        )
    return columns


def read_series(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return one sample for each window over sensor recordings; windows are cut out on access.

    No window contains a bad row or spans two recordings. Long recordings are stored on disk once. Bad rows are added to
    ``reading.problems``.

    Raises:
        DataError: The model takes samples of another shape or several labels a window, or bad rows are refused.
    """
    reader = reading.reader
    assert isinstance(reader, SeriesSpec)
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
                labels.append(_most_frequent(own[part]))
    if not places and not reading.problems.count:
        raise DataError(
            f"{reading.source}: no recording has the {window} rows of a window of this federation",
            window=window,
        )

    whole = rows.array()

    def cut(start: int) -> Array:
        found = whole[start : start + window].copy()
        return found if reader.channels_last else np.ascontiguousarray(found.T)

    return ReadSamples(
        DecodedRows(places, cut), np.array(labels, np.float64 if reading.label.floats else np.int64)
    )


def _recordings(
    reading: ReadContext, reader: SeriesSpec, entries: tuple[FileEntry, ...], kept: Spool
) -> Iterator[tuple[int, Array, Array]]:
    """Append each file's rows to ``kept``; yield (first row in ``kept``, labels (n,), True for each good row (n,))."""
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
                held = _flush(held, reader, kept)
        _flush(held, reader, kept)
        yield begin, np.array(own), np.array(good, bool)


def _flush(held: array[float], reader: SeriesSpec, kept: Spool) -> array[float]:
    """Scale the rows in ``held`` and append them to ``kept``; return an empty array to collect the next ones."""
    kept.extend(rescale(np.array(held, np.float64).reshape(-1, len(reader.columns)), reader))
    return array("d")


def _most_frequent(labels: Array) -> float:
    """Return the most frequent label; of equally frequent ones the first."""
    values, first, counts = np.unique(labels, return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return float(values[best[np.argmin(first[best])]])
