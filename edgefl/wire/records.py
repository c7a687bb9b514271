"""Parser of records in CSV and JSON lines, used on devices and for the server's data."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.readers import SeriesSpec, TableSpec, TextSpec
from edgefl.wire.tensors import Array

_NAMED = 12
"""Most classes that an error lists."""
_WHOLE = re.compile(r"\.0*$")
"""Suffix that spreadsheet programs write behind a whole number."""
_DIGITS = 12
"""Most digits of a class number: Python refuses to parse thousands of digits."""
_LONG = 60
"""Most characters of a value in an error."""


def shorten(value: object) -> str:
    """Return ``repr(value)`` for an error text, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


class BadRow(Exception):
    """A record that cannot be used. The text is the reason."""


def parse_number(value: object, what: str, dtype: str) -> float:
    """Return the finite number in a field.

    Args:
        value: Field of a record.
        what: Name of the field, for the error text.
        dtype: Dtype whose range the number must fit.

    Raises:
        BadRow: ``value`` is empty, no number, NaN, infinite, or beyond the range of ``dtype``.
    """
    if value is None or value == "":
        raise BadRow(f"{what} is empty")
    try:
        number = float(value) if isinstance(value, str | int | float) and "_" not in str(value) else np.nan
    except (ValueError, OverflowError):
        number = np.nan
    if not np.isfinite(number):
        raise BadRow(f"{what} is {shorten(value)}, which is no number")
    least, most = limits_of(dtype)
    if not least <= number <= most:
        raise BadRow(f"{what} is {shorten(value)}, which is beyond what {dtype} holds")
    return number


def limits_of(dtype: str) -> tuple[float, float]:
    """Return the smallest and the largest float that ``dtype`` can represent."""
    if dtype == "bool":
        return 0.0, 1.0
    limits = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
    least, most = float(limits.min), float(limits.max)
    return least, most if most <= limits.max else math.nextafter(most, 0.0)  # 2**63 is no int64


def is_number(text: str) -> bool:
    """Return True if ``text`` is a finite number."""
    try:
        parse_number(text, "", "float64")
    except BadRow:
        return False
    return True


def is_text(text: str) -> bool:
    """Return True if ``text`` can be encoded in UTF-8. Bytes of another encoding and unpaired surrogates cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


NOT_TEXT = "it is no text in UTF-8"


def join_names(names: Sequence[str]) -> str:
    """Return ``names`` joined by commas for an error text: the first twelve, and the total count if there are more."""
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def strip_zeros(text: str) -> str:
    """Return ``text`` without a final point and zeros: "3.0" becomes "3". Spreadsheet programs write class numbers so."""
    return _WHOLE.sub("", text)


def class_number(value: object, names: Sequence[str], classes: int) -> int:
    """Return the number of a class from the label of a record.

    Args:
        value: Label as it is in the file.
        names: Names of the classes in the order of their numbers. Empty: labels are the numbers.
        classes: Number of classes.

    Raises:
        BadRow: The federation has no such class.
    """
    text = str(value).strip()
    if names:
        # macOS writes e and its accent apart.
        alike = [unicodedata.normalize("NFC", each) for each in names]
        written = unicodedata.normalize("NFC", text)
        for each in (written, strip_zeros(written)):
            if each in alike:
                return alike.index(each)
        raise BadRow(f"no class is called {shorten(text)}; the federation's are {join_names(names)}")
    digits = strip_zeros(text)
    if digits.isdecimal() and len(digits) <= _DIGITS and int(digits) < classes:
        return int(digits)
    raise BadRow(
        f"class {shorten(text)} is no number from 0 to {classes - 1}, which is what the federation's classes are called by"
    )


RECORDS = (".csv", ".jsonl")
_LONGEST_FIELD = 1 << 26
"""Characters of one field of a CSV."""
_UNCLOSED = "unexpected end of data"
"""Error text of ``csv`` for a quotation mark that is open at the end of the file."""
_SEPARATOR_LINE = re.compile(r"sep=.", re.IGNORECASE)
"""Line in which Excel names the column separator, before the header."""

Checks = Mapping[str, Callable[[str], bool] | None]
"""Columns that a file must have, by name. A check returns False for a value that cannot be in its column.
None: no check."""
Record = Mapping[str, object] | str
"""Fields by column, or the error text of a malformed line."""


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns: the header of a CSV, or the keys of the first object of JSON lines.

    Args:
        path: File in CSV, or in JSON lines if it ends in ``.jsonl``.

    Raises:
        DataError: The file cannot be read, has no record, or does not separate its columns by commas.
    """
    for line, record in records(path, {}):
        if isinstance(record, str):
            raise DataError(f"{path}, line {line}: {record}; repair or remove it", path=str(path))
        return list(record)
    raise DataError(
        f"{path} has no records: expected names of columns in the first line and a record in each other line, or a JSON "
        "object in each line",
        path=str(path),
    )


def records(path: Path, checks: Checks) -> Iterator[tuple[int, Record]]:
    """Yield (line number, record) for each row of a CSV with a header, or of JSON lines.

    A record is a mapping of the fields by column. For a malformed row it is the error text instead. Blank lines are
    skipped.

    Args:
        path: File in CSV, or in JSON lines if it ends in ``.jsonl``.
        checks: Columns that a CSV must have, each with a check of its values or None. The checks also detect a
            quotation mark that hides rows.

    Raises:
        DataError: The file cannot be read or is no text. A CSV lacks a column of ``checks`` or has it twice, or a quotation
            mark hides rows.
    """
    try:
        # What is no UTF-8 spoils its own line alone.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, _object(line)
                return
            csv.field_size_limit(_LONGEST_FIELD)
            lines = _CsvLines(path, file)
            head = lines.head(list(checks))
            for number, fields in lines.rows(head, checks):
                yield number, fields if isinstance(fields, str) else _record(head, fields)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", path=str(path)) from error


@dataclass
class _CsvLines:
    """Reader of a CSV that counts its lines. It iterates over the lines; :meth:`head` and :meth:`rows` parse them.

    Attributes:
        path: File, for error texts.
        file: Iterator over the lines.
        number: Number of lines read.
        last: Lines read since the beginning of the current record.
        spaced: True if the header has blanks behind its commas, which the rows may then have too.
    """

    path: Path
    file: Iterator[str]
    number: int = 0
    last: list[str] = dataclasses.field(default_factory=list)
    spaced: bool = False

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.number += 1
            self.last.append(line)
            yield line

    def head(self, needed: Sequence[str]) -> list[str]:
        """Read the header and return the column names without surrounding blanks. Skips Excel's line ``sep=``.

        Args:
            needed: Columns that must exist.

        Raises:
            DataError: A needed column is missing or occurs twice.
        """
        names = self._first()
        if _SEPARATOR_LINE.fullmatch(",".join(names)):
            self.last.clear()
            names = self._first()
        stripped = [name if name in needed else name.strip() for name in names]
        self.spaced = stripped[1:] != names[1:]
        if not set(needed) <= set(stripped) and len("".join(names).splitlines()) > 1:
            raise self._open_quote(self.number - len(self.last) + 1)
        _check_columns(self.path, stripped, needed)
        return stripped

    def rows(self, head: Sequence[str], checks: Checks) -> Iterator[tuple[int, list[str] | str]]:
        """Yield (line number, fields) for each row. A malformed row yields (line number, error text) instead.

        Skips blank lines.

        Args:
            head: Names of the columns.
            checks: Checks of the columns' values, to detect rows inside a quoted field.

        Raises:
            DataError: A quotation mark hides the rows behind it: it is open at the end of the file, or closed by
                one of a later row.
        """
        table, spaced = csv.reader(self, strict=True, skipinitialspace=self.spaced), self.spaced
        while True:
            self.last.clear()
            line, wrong = self.number + 1, ""
            try:
                fields = next(table, None)
            except csv.Error as error:
                fields, wrong = [], str(error)
                if wrong == _UNCLOSED:
                    raise self._open_quote(line, wrong) from error
            if fields is None:
                return
            if len(self.last) > 1 and _hides_rows(self.last, head, checks, spaced, wrong):
                raise self._open_quote(line)
            if wrong:
                yield (
                    line,
                    f"it is no line of a CSV ({wrong}); quote the field, and double quotation marks inside of it",
                )
            elif fields:
                spaced = spaced or (len(self.last) == 1 and _has_blanks(fields))
                yield line, fields

    def _first(self) -> list[str]:
        """Return the fields of the next line that is not blank, or [] at the end of the file.

        Raises:
            DataError: The line is no valid CSV, such as one with a misplaced quotation mark.
        """
        try:
            return next(filter(None, csv.reader(self, strict=True)), [])
        except csv.Error as error:
            raise self._open_quote(1, str(error)) from error

    def _open_quote(self, line: int, wrong: str = "") -> DataError:
        """Return the error for a misplaced quotation mark.

        Args:
            line: Line of the opening mark.
            wrong: Error text of ``csv``. "": the mark is closed in a later row.
        """
        what = wrong
        if wrong == _UNCLOSED:
            what = "a quotation mark is opened here and never closed"
        elif not wrong:
            what = f"a quotation mark is opened here and closed in line {self.number}, and what is in between are rows"
        return DataError(
            f"{self.path}, line {line}: {what}; close it, or double it inside of a field", path=str(self.path)
        )


def _hides_rows(lines: Sequence[str], head: Sequence[str], checks: Checks, spaced: bool, wrong: str) -> bool:
    """Return True if the lines inside a quoted field are rows themselves, so that its quotation mark must be a mistake.

    A text may contain as many commas as there are columns. A row differs from it: its label is one of the classes, and
    its numbers are numbers. No blank follows its commas, unless other rows have blanks there (``spaced``).

    Args:
        lines: Lines of the quoted field, from the one that opens the quote.
        head: Names of the columns.
        checks: Checks of the columns' values.
        spaced: True if other rows have blanks behind their commas.
        wrong: Error text of ``csv`` at the closing mark, or "". Without an error the opening line must look like a row
            too.
    """
    places = {head.index(name): check for name, check in checks.items() if check}
    before = len(next(csv.reader(lines[:1]))) - 1

    def is_row(row: Sequence[str], skipped: int = 0) -> bool:
        fields = [value.strip('" \t\r\n') for value in row]
        return all(check(fields[place + skipped * (place > before)]) for place, check in places.items())

    opening = next(csv.reader(lines[:1], quoting=csv.QUOTE_NONE))
    inside = [row for line in lines[1:] if (row := next(csv.reader([line]), []))]
    if not places or (
        not wrong and not (len(opening) >= len(head) and is_row(opening, len(opening) - len(head)))
    ):
        return False
    rows = [row for row in inside if len(row) == len(head) and is_row(row)]
    return 2 * len([row for row in rows if spaced or not _has_blanks(row)]) >= len(inside)


def _has_blanks(row: Sequence[str]) -> bool:
    """Return True if a field other than the first begins with a blank."""
    return any(field[:1] == " " for field in row[1:])


def field(record: Record, name: str) -> object:
    """Return the value of the column ``name``, or None if the record lacks it.

    Raises:
        BadRow: ``record`` is the error text of a malformed line.
    """
    if isinstance(record, str):
        raise BadRow(record)
    return record.get(name)


def text_of(record: Record, reader: TextSpec) -> str:
    """Return the text of a record, from the column that ``reader`` names.

    Raises:
        BadRow: The line is malformed, or the column has no text in UTF-8.
    """
    text = field(record, reader.text)
    if not isinstance(text, str):
        raise BadRow(f"column {reader.text!r} is {shorten(text)}, which is no text")
    if not is_text(text):
        raise BadRow(NOT_TEXT)
    return text


def numbers(record: Record, columns: Sequence[str], dtype: str, below: int = 0) -> list[float]:
    """Return the numbers in some columns of a record.

    Args:
        record: Record of a file.
        columns: Names of the columns, in the order of the result.
        dtype: Dtype of the model's input. An integer dtype requires whole numbers.
        below: Bound of whole numbers, exclusive. 0: unbounded.

    Raises:
        BadRow: A number is missing, invalid or out of range.
    """
    row = [parse_number(field(record, name), f"column {name!r}", dtype) for name in columns]
    if not np.issubdtype(dtype, np.floating):
        for name, value in zip(columns, row, strict=True):
            if value != int(value):
                raise BadRow(f"column {name!r} is {shorten(field(record, name))}, which is no whole number")
            if below and not 0 <= value < below:
                raise BadRow(
                    f"column {name!r} is {int(value)}, the model takes whole numbers from 0 to {below - 1}"
                )
    return row


def rescale(rows: Array, reader: TableSpec | SeriesSpec) -> Array:
    """Return ``(rows - mean) / deviation`` for rows of shape (n, columns). A reader without mean or deviation skips that
    step.
    """
    centred = rows - np.array(reader.mean) if reader.mean else rows
    return centred / np.array(reader.deviation) if reader.deviation else centred


def _check_columns(path: Path, found: Sequence[str], needed: Sequence[str]) -> None:
    """Check the header of a CSV.

    Raises:
        DataError: The header is no UTF-8 text or has no commas, or a needed column is missing or occurs twice.
    """
    if not all(is_text(name) and "\0" not in name for name in found):  # UTF-16 has zeros
        raise DataError(f"{path} cannot be read as text (UTF-8): convert it", path=str(path))
    missing = [name for name in needed if name not in found]
    separators = [each for each in (";", "\t", "|") if len(found) == 1 and each in found[0]]
    if separators and (missing or not needed):
        raise DataError(
            f"{path} separates its columns by {separators[0]!r}, expected commas: write it with commas between the "
            "columns and points in the numbers",
            path=str(path),
        )
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {join_names(list(map(repr, found))) or 'none'}: columns are "
            "called as the federation calls them, in the first line",
            missing=missing,
        )
    if twice := [name for name in needed if list(found).count(name) > 1]:
        raise DataError(
            f"{path} has column {twice[0]!r} more than once: give each a name of its own, in the first line",
            twice=twice,
        )


def _object(line: str) -> Record:
    """Return the object in a line of JSON, or the error text for a line without a valid object."""
    if not is_text(line):
        return NOT_TEXT
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        return f"it is no JSON: {error}"
    except ValueError:  # Python converts no number of more than 4,300 digits
        return "it has a number of thousands of digits"
    except RecursionError:
        return "it is JSON that is nested too deeply"
    return found if isinstance(found, dict) else "it is no JSON object"


def _record(head: Sequence[str], fields: Sequence[str]) -> Record:
    """Return the fields of a CSV line by column, or an error text. Columns beyond the end of a short line are left out.

    Args:
        head: Names of the columns.
        fields: Fields of the line.
    """
    if len(fields) > len(head):
        return f"it has {len(fields)} fields, and there are {len(head)} columns"
    return dict(zip(head, fields, strict=False)) if all(map(is_text, fields)) else NOT_TEXT
