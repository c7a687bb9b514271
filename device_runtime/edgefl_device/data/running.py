"""Running text: windows of it that lie end to end, and the tokens that follow each.

It is read piece by piece, and its tokens lie on the disk where they are many: a text may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.readers import TextReader
from edgefl.wire.records import RECORDS, BadRow, records, text_of
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import Entry, Reading, Samples
from edgefl_device.data.spool import Spool
from edgefl_device.data.tokens import Encode, check_vocabulary, encoder, kept_as

_TOGETHER = 1024
"""Pieces that become tokens in one call of the tokenizer."""
PIECE = 1 << 20
"""Characters of a text that are read together, and become tokens in one call."""


class _Piece(NamedTuple):
    """Some of the text ``where``, or what is wrong with it."""

    where: str
    text: str
    problem: str = ""


def read(reading: Reading, reader: TextReader, entries: tuple[Entry, ...]) -> Samples:
    """Windows in all texts, one after the other, and the tokens that follow each. A text with a problem is left out
    whole."""
    tokens = Spool(kept_as(reading.spec))
    pieces = _encoded(_pieces(reader, entries), encoder(reading, reader))
    for where, text in groupby(pieces, lambda pair: pair[0].where):
        begin = len(tokens)
        try:
            _append(reading, text, tokens)
        except BadRow as bad:
            tokens.truncate(begin)
            reading.problems.add(where, str(bad))
    return _windows(reading, tokens.array())


def _append(reading: Reading, text: Iterable[tuple[_Piece, Array]], tokens: Spool) -> None:
    begin, blank = len(tokens), True
    for piece, row in text:
        if piece.problem:
            raise BadRow(piece.problem)
        check_vocabulary(reading.spec, row)
        tokens.extend(row)
        blank = blank and not piece.text.strip()
    if blank or len(tokens) == begin:
        raise BadRow("the text is empty")


def _encoded(pieces: Iterable[_Piece], encode: Encode) -> Iterator[tuple[_Piece, Array]]:
    for block in _blocks(pieces):
        yield from zip(block, encode([piece.text for piece in block]), strict=True)


def _blocks(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    block: list[_Piece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text)
        if len(block) == _TOGETHER or size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _pieces(reader: TextReader, entries: tuple[Entry, ...]) -> Iterator[_Piece]:
    for entry in entries:
        if entry.path.suffix.lower() not in RECORDS:
            yield from _of_file(entry)
            continue
        for line, record in records(entry.path, {reader.text: None}):
            where = f"{entry.path}, line {line}"
            try:
                yield _Piece(where, text_of(record, reader))
            except BadRow as bad:
                yield _Piece(where, "", str(bad))


def _of_file(entry: Entry) -> Iterator[_Piece]:
    where, rest, count = str(entry.path), "", 0
    try:
        with entry.path.open(encoding="utf-8-sig") as file:
            while more := file.read(PIECE):
                rest += more
                end = _end(rest) if len(more) == PIECE else len(rest)
                yield _Piece(where, rest[:end])
                rest, count = rest[end:], count + 1
    except (UnicodeDecodeError, OSError) as error:
        yield _Piece(where, "", f"it cannot be read as text (UTF-8): {error}")
        return
    if rest or not count:
        yield _Piece(where, rest)


def _end(text: str) -> int:
    """Where the last line ends, or the last word where it is a single line: a tokenizer should see both whole."""
    return text.rfind("\n") + 1 or text.rfind(" ") + 1 or len(text)


def _windows(reading: Reading, stream: Array) -> Samples:
    length = reading.spec.shape[0]
    count = max(0, len(stream) - 1) // length
    if not count and not reading.problems.count:
        raise DataError(
            f"{reading.source} has {len(stream)} tokens, and a sample of this federation takes {length + 1}: add text",
            tokens=len(stream),
        )
    x, y = (np.asarray(stream[at : at + count * length]).reshape(count, length) for at in (0, 1))
    return Samples(x, y)
