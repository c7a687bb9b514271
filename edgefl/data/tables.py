"""Loader of a file of records (CSV or JSON lines), parsed as devices parse their files."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edgefl.data.dataset import Array, Dataset
from edgefl.data.partition import hold_out
from edgefl.data.text.corpora import Corpus, Texts
from edgefl.errors import DataError
from edgefl.wire.bundle.readers import TableSpec, TextSpec
from edgefl.wire.records import (
    RECORDS,
    BadRow,
    Checks,
    class_number,
    column_names,
    field,
    is_number,
    is_text,
    join_names,
    numbers,
    parse_number,
    records,
    rescale,
    shorten,
    strip_zeros,
    text_of,
)

_CLASS = re.compile(r"[+-]?\d+")
_MISSING = ("nan", "na", "n/a", "null", "none", "inf", "-inf")
"""Values that spreadsheet programs write for a missing number."""
_MOST_NUMBERED = 100
"""Most different whole numbers that count as classes. With more they count as numbers to predict."""


def is_table(path: Path) -> bool:
    """Return True if the suffix of ``path`` is one of CSV or JSON lines. The file is not opened."""
    return path.suffix.lower() in RECORDS


def reader_of(path: Path, label: str) -> TableSpec | TextSpec:
    """Return the default reader (settings that turn records into samples) for a file of records. Reads its column names.

    Args:
        path: CSV or JSON lines.
        label: Column of the class.

    Returns:
        A reader of the column ``text`` if there is one, else of all columns but ``label`` as numbers.

    Raises:
        DataError: The file has no column ``label``, or no other column.
    """
    names = column_names(path)
    if label not in names:
        raise DataError(
            f"{path} has no column {label!r}, expected one with the class of each record; it has "
            f"{join_names(list(map(repr, names)))}: let `label` name one of these",
            label=label,
        )
    text = TextSpec(label=label)
    if text.text in names:
        return text
    columns = tuple(name for name in names if name != label)
    if not columns:
        raise DataError(f"{path} has no column beside {label!r}: add those that the model reads")
    return TableSpec(columns=columns, label=label)


def load(path: Path, reader: TableSpec, seed: int, *, standardize: bool, train: bool = True) -> Dataset:
    """Load the records of a file as samples (n, columns), float32.

    Args:
        path: CSV or JSON lines.
        reader: Columns, their scale, and the column of the label.
        seed: Seed of the choice of test records, one fifth of each class.
        standardize: Replace mean and deviation of ``reader`` by the mean and standard deviation of the training
            samples, or of the test samples without ``train``.
        train: False if all records are for testing, because devices have their own data.

    Returns:
        Dataset that includes the reader, so that devices read their own files in the same way.

    Raises:
        DataError: A record cannot be used (the message names its line), or labels allow no split.
    """
    if reader.others:
        raise DataError(
            f"{path}: `others` of a reader is for files of devices: save several inputs in an .npz"
        )
    labels = _LabelColumn.of(path, reader.label)
    checks: Checks = {**dict.fromkeys(reader.columns, is_number), reader.label: labels.fits}
    values, targets = array("d"), array("d")
    for line, record in records(path, checks):
        try:
            row = numbers(record, reader.columns, "float32")
            targets.append(labels.number(field(record, reader.label)))
        except BadRow as bad:
            raise _record_error(path, line, bad) from bad
        values.extend(row)
    rows = np.array(values).reshape(-1, len(reader.columns))
    y = np.array(targets, np.float32 if labels.floats else np.int64)
    chosen, held_out = _split(y, labels.floats, seed) if train else (np.arange(0), np.arange(len(y)))
    if standardize:
        seen = rows[chosen] if train else rows
        # The deviation of equal numbers may be rounded to something above 0.
        varies = seen.max(axis=0) > seen.min(axis=0)
        deviation = np.where(varies, seen.std(axis=0), 1.0)
        reader = replace(reader, mean=tuple(seen.mean(axis=0).tolist()), deviation=tuple(deviation.tolist()))
    x = rescale(rows, reader).astype(np.float32)
    return Dataset.of(
        x[chosen],
        y[chosen],
        x[held_out],
        y[held_out],
        name=path.name,
        classes=labels.classes,
        names=labels.names,
        reader=reader,
    )


def load_texts(path: Path, reader: TextSpec, seed: int, *, train: bool = True) -> Corpus:
    """Load the texts of a file and their classes as a corpus.

    Args:
        path: CSV or JSON lines.
        reader: Columns of text and label.
        seed: Seed of the choice of test records, one fifth of each class.
        train: False if all records are for testing, because devices have their own data.

    Raises:
        DataError: A record cannot be used (the message names its line), or labels are no classes.
    """
    labels = _LabelColumn.of(path, reader.label)
    if labels.floats:
        raise DataError(f"{path}: column {reader.label!r} has numbers, expected classes of texts")
    texts: list[str] = []
    targets = array("q")
    for line, record in records(path, {reader.text: None, reader.label: labels.fits}):
        try:
            text = text_of(record, reader)
            targets.append(int(labels.number(field(record, reader.label))))
            if not text.strip():
                raise BadRow("the text is empty")
        except BadRow as bad:
            raise _record_error(path, line, bad) from bad
        texts.append(text)
    y = np.array(targets, np.int64)
    chosen, held_out = _split(y, False, seed) if train else (np.arange(0), np.arange(len(y)))
    whole_file = Texts(texts, y)
    names = labels.names or tuple(map(str, range(labels.classes)))
    return Corpus(path.name, whole_file.at(chosen), whole_file.at(held_out), names)


def _label(value: object) -> str:
    """Return the label ``value`` of a record as normalized text without spaces at its ends.

    Raises:
        BadRow: It is empty or no text in UTF-8.
    """
    text = "" if value is None else unicodedata.normalize("NFC", str(value).strip())
    if not text:
        raise BadRow("the label is empty")
    if "\0" in text or not is_text(text):
        raise BadRow(f"the label is no text in UTF-8: {shorten(text)}")
    return text


def _is_missing(text: str) -> bool:
    return text.lower() in _MISSING


@dataclass(frozen=True)
class _LabelColumn:
    """Labels of a file, found by reading its label column: names of classes, class numbers, or numbers to predict.

    Attributes:
        classes: Number of classes; 1 if labels are numbers to predict.
        names: Names of the classes, in the order of their numbers. Empty if the labels are the class numbers from 0.
        floats: True if labels are numbers to predict.
    """

    classes: int
    names: tuple[str, ...] = ()
    floats: bool = False

    @classmethod
    def of(cls, path: Path, column: str) -> _LabelColumn:
        """Read the column ``column`` of a file and return the kind of its labels.

        Raises:
            DataError: A label is missing or invalid, or all labels are equal.
        """
        found: dict[str, int] = {}
        for line, record in records(path, {column: None}):
            try:
                found.setdefault(_label(field(record, column)), line)
            except BadRow as bad:
                raise _record_error(path, line, bad) from bad
        others = {text: line for text, line in found.items() if not is_number(text)}
        if not others:
            return cls._of_numbers(path, column, found)
        numbers = [float(text) for text in found if text not in others]
        if numbers and (not all(map(float.is_integer, numbers)) or all(map(_is_missing, others))):
            text, line = next(iter(others.items()))
            raise _record_error(path, line, BadRow(f"the label is {shorten(text)}, which is no number"))
        return cls._named(path, column, sorted(found))

    @classmethod
    def _of_numbers(cls, path: Path, column: str, found: Mapping[str, int]) -> _LabelColumn:
        """Return the kind of labels that are all numbers: numbers to predict if one has a fraction, else classes.

        Args:
            path: File, for errors.
            column: Name of the column, for errors.
            found: First line of each label, by its text.

        Raises:
            DataError: A class is not written in digits, or there are fewer than two or too many classes.
        """
        if not all(float(text).is_integer() for text in found):
            return cls(1, floats=True)
        for text, line in found.items():
            if not _CLASS.fullmatch(strip_zeros(text)):
                raise _record_error(
                    path, line, BadRow(f"the label is {shorten(text)}: write a class in digits, such as 2")
                )
        names = sorted({strip_zeros(text) for text in found}, key=lambda text: (float(text), text))
        if len(names) > _MOST_NUMBERED and names != list(map(str, range(len(names)))):
            raise DataError(
                f"{path}: column {column!r} has {len(names)} different whole numbers, expected at most {_MOST_NUMBERED} "
                "classes; name another column, or write numbers to predict with a decimal (250000.5)"
            )
        made = cls._named(path, column, names)
        return cls(made.classes) if names == list(map(str, range(len(names)))) else made

    @classmethod
    def _named(cls, path: Path, column: str, names: Sequence[str]) -> _LabelColumn:
        if len(names) < 2:
            raise DataError(
                f"{path}: column {column!r} has {len(names)} class, expected at least 2; add records, or name another column"
            )
        return cls(len(names), tuple(names))

    def number(self, value: object) -> float:
        """Return the class number of a label, or the number to predict.

        Raises:
            BadRow: The label is neither a class of the column nor a number.
        """
        return (
            parse_number(value, "the label", "float32")
            if self.floats
            else class_number(value, self.names, self.classes)
        )

    def fits(self, text: str) -> bool:
        """Return True if ``text`` is a valid label of this column."""
        try:
            self.number(text)
        except BadRow:
            return False
        return True


def _split(labels: Array, floats: bool, seed: int) -> tuple[Array, Array]:
    """Return (row numbers for training, row numbers for testing), both ascending int64.

    A fifth of each class is for testing.

    ``floats`` True: labels are numbers to predict, and a fifth of all rows is for testing.

    Raises:
        DataError: No class has two rows.
    """
    kinds = np.zeros(len(labels), np.int64) if floats else labels
    rows = {kind: np.flatnonzero(kinds == kind).tolist() for kind in np.unique(kinds).tolist()}
    train, test = (np.array(sorted(chain(*part.values())), np.int64) for part in hold_out(rows, seed))
    return train, test


def _record_error(path: Path, line: int, bad: BadRow) -> DataError:
    """Return the DataError for the record in line ``line`` of a file, which ``bad`` describes."""
    where = f"{path}, line {line}"
    return DataError(f"{where}: {bad}; repair or remove it", where=where)
