"""A sample for each text and its class, in tokens, with zeros behind it.

Running text: :mod:`edgefl_device.data.tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import Input
from edgefl.wire.bundle.readers import TextReader
from edgefl.wire.records import NOT_TEXT, RECORDS, BadRow, Record, field, is_text, records, text_of
from edgefl.wire.tensors import Array
from edgefl_device.data import tokens as token_windows
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples
from edgefl_device.data.spool import Spool
from edgefl_device.data.tokens import check_vocabulary, encoder, kept_as

_TOGETHER = 1024
"""Texts that become tokens in one call of the tokenizer."""


def read(reading: Reading, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return a sample for each text and its class; or windows of running text, whose labels are the tokens that follow."""
    reader, shape = reading.reader, reading.spec.shape
    assert isinstance(reader, TextReader)
    if len(shape) != 1:
        raise DataError(
            f"{reading.source}: texts become samples of shape (tokens,), the model takes {shape}: give arrays (.npz)",
            expected=shape,
        )
    if reading.label.shape == shape:
        return token_windows.read(reading, reader, entries)
    masks = _masks(reading, reader)
    tokens = Spool(kept_as(reading.spec), shape)
    mask = Spool("uint8", shape)
    labels = array("d")
    texts, encode = _labelled(reading, reader, entries), encoder(reading, reader)
    while block := tuple(islice(texts, _TOGETHER)):
        good: list[Array] = []
        for (where, text, label), row in zip(block, encode([text for _, text, _ in block]), strict=True):
            try:
                good.append(_checked(reading, text, row)[: shape[0]])
                labels.append(label)
            except BadRow as bad:
                reading.problems.add(where, str(bad))
        for spool, rows in zip((tokens, mask), _padded(good, shape[0]), strict=True):
            spool.extend(rows)
    kind = np.float64 if reading.label.floats else np.int64
    beside = {each.name: mask.array() for each in masks}
    return ReadSamples(tokens.array(), np.array(labels, kind), beside)


def _checked(reading: Reading, text: str, row: Array) -> Array:
    if not text.strip() or not row.size:
        raise BadRow("the text is empty")
    check_vocabulary(reading.spec, row)
    return row


def _masks(reading: Reading, reader: TextReader) -> tuple[Input, ...]:
    """Return the inputs besides the tokens, which can only be their mask."""
    for each in reading.spec.others:
        if each.name != reader.mask:
            raise DataError(
                f"{reading.source}: a text gives no input {each.name!r}, which the model reads: give arrays (.npz)"
            )
    return reading.spec.others


def _padded(rows: Sequence[Array], length: int) -> tuple[Array, Array]:
    """Return ``rows``, no longer than ``length``, padded with zeros, and the mask of their entries."""
    tokens, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.uint8)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, 1
    return tokens, mask


def _labelled(
    reading: Reading, reader: TextReader, entries: tuple[FileEntry, ...]
) -> Iterator[tuple[str, str, float]]:
    """Yield (where, text, label): a file in a class folder is a text; lines of others are ``label<TAB>text`` or records."""
    inside = tuple(each for each in entries if _is_text_of_class(each))
    for entry, number in reading.by_folder(inside) if inside else ():
        try:
            yield str(entry.path), _content(entry), number
        except BadRow as bad:
            reading.problems.add(str(entry.path), str(bad))
    for entry in (each for each in entries if not _is_text_of_class(each)):
        for line, record in _lines(entry, reader, reading.is_label):
            where = f"{entry.path}, line {line}"
            try:
                text, label = text_of(record, reader), reading.number(field(record, reader.label))
            except BadRow as bad:
                reading.problems.add(where, str(bad))
            else:
                yield where, text, label


def _is_text_of_class(entry: FileEntry) -> bool:
    return bool(entry.folder) and entry.path.suffix.lower() == ".txt"


def _lines(
    entry: FileEntry, reader: TextReader, is_label: Callable[[str], bool]
) -> Iterator[tuple[int, Record]]:
    if entry.path.suffix.lower() in RECORDS:
        yield from records(entry.path, {reader.text: None, reader.label: is_label})
        return
    try:
        with entry.path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for line, content in enumerate(file, 1):
                if content.strip():
                    yield line, _record(content.removesuffix("\n"), reader)
    except OSError as error:
        raise DataError(f"{entry.path} cannot be read: {error}", path=str(entry.path)) from error


def _record(line: str, reader: TextReader) -> Record:
    if not is_text(line):
        return NOT_TEXT
    label, tab, text = line.partition("\t")
    return {reader.label: label, reader.text: text} if tab else "it has no tab behind a label"


def _content(entry: FileEntry) -> str:
    try:
        return entry.path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise BadRow(f"it cannot be read as text (UTF-8): {error}") from error
