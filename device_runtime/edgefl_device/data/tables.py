"""Records of CSV or JSON lines, their columns by name."""

from __future__ import annotations

from array import array

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import Input
from edgefl.wire.bundle.readers import TableReader
from edgefl.wire.records import BadRow, Checks, field, is_number, numbers, records, scaled
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples
from edgefl_device.data.spool import Spool

TOGETHER = 4096
"""Rows that are kept as Python has them until they become arrays."""


def read(reading: Reading, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return the rows of tables with the same columns, one after the other."""
    reader = reading.reader
    assert isinstance(reader, TableReader)
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
            spool.extend(scaled(rows.reshape(-1, len(reader.columns)), reader) if name == "x" else rows)
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


def _columns_of(reader: TableReader, wanted: Input) -> tuple[str, ...]:
    columns = tuple(reader.others.get(wanted.name, (wanted.name,)))
    if len(columns) != int(np.prod(wanted.shape)):
        raise DataError(
            f"input {wanted.name!r} has shape {wanted.shape}, and the federation reads it of {len(columns)} columns: name "
            "as many in `others` of its reader",
            name=wanted.name,
        )
    return columns
