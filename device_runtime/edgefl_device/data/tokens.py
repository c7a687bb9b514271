"""Texts as token numbers: by the tokenizer in the bundle (extra ``text``), or the bytes of UTF-8, which need nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from edgefl.errors import BundleError, ConfigError, DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import TextReader
from edgefl.wire.records import RECORDS, BadRow, records, text_of
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples
from edgefl_device.data.spool import Spool

Encode = Callable[[Sequence[str]], Sequence[Array]]
"""Texts as the token numbers of each, (tokens,)."""


def encoder(reading: Reading, reader: TextReader) -> Encode:
    """Return the encoder of texts; ConfigError without the tokenizer's library, BundleError if the tokenizer is damaged."""
    if reader.tokenizer is None:
        return lambda texts: [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "texts become tokens by the library tokenizers, which is not installed: pip install 'edgefl-tiers[text]'"
        ) from error
    content = reading.parts.blob(reader.tokenizer)
    try:
        made = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises its own bare exceptions
        raise BundleError(
            f"the bundle's tokenizer cannot be read: {error}; export the bundle again"
        ) from error

    def encode(texts: Sequence[str]) -> list[Array]:
        found = made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int64) for each in found]

    return encode


def check_vocabulary(spec: DataSpec, tokens: Array) -> None:
    """Raise BadRow for a token that the model does not know."""
    if spec.below and tokens.size and tokens.max() >= spec.below:
        raise BadRow(f"token {tokens.max()} is beyond the vocabulary, whose tokens are 0 to {spec.below - 1}")


def kept_as(spec: DataSpec) -> np.dtype:
    """Return the smallest type that holds the tokens of ``spec``, which become its own when a batch is drawn."""
    own = np.dtype(spec.dtype)
    return np.min_scalar_type(spec.below - 1) if spec.below and own.kind in "iu" else own


_TOGETHER = 1024
"""Pieces that become tokens in one call of the tokenizer."""
PIECE = 1 << 20
"""Characters of a text that are read together, and become tokens in one call."""


class _TextPiece(NamedTuple):
    """Some of the text ``where``, or what is wrong with it."""

    where: str
    text: str
    problem: str = ""


def read(reading: Reading, reader: TextReader, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return the windows of all texts, one after the other, and the tokens that follow each. A text with a problem is
    left out whole."""
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


def _append(reading: Reading, text: Iterable[tuple[_TextPiece, Array]], tokens: Spool) -> None:
    begin, blank = len(tokens), True
    for piece, row in text:
        if piece.problem:
            raise BadRow(piece.problem)
        check_vocabulary(reading.spec, row)
        tokens.extend(row)
        blank = blank and not piece.text.strip()
    if blank or len(tokens) == begin:
        raise BadRow("the text is empty")


def _encoded(pieces: Iterable[_TextPiece], encode: Encode) -> Iterator[tuple[_TextPiece, Array]]:
    for block in _blocks(pieces):
        yield from zip(block, encode([piece.text for piece in block]), strict=True)


def _blocks(pieces: Iterable[_TextPiece]) -> Iterator[list[_TextPiece]]:
    block: list[_TextPiece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text)
        if len(block) == _TOGETHER or size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _pieces(reader: TextReader, entries: tuple[FileEntry, ...]) -> Iterator[_TextPiece]:
    for entry in entries:
        if entry.path.suffix.lower() not in RECORDS:
            yield from _of_file(entry)
            continue
        for line, record in records(entry.path, {reader.text: None}):
            where = f"{entry.path}, line {line}"
            try:
                yield _TextPiece(where, text_of(record, reader))
            except BadRow as bad:
                yield _TextPiece(where, "", str(bad))


def _of_file(entry: FileEntry) -> Iterator[_TextPiece]:
    where, rest, count = str(entry.path), "", 0
    try:
        with entry.path.open(encoding="utf-8-sig") as file:
            while more := file.read(PIECE):
                rest += more
                end = _end(rest) if len(more) == PIECE else len(rest)
                yield _TextPiece(where, rest[:end])
                rest, count = rest[end:], count + 1
    except (UnicodeDecodeError, OSError) as error:
        yield _TextPiece(where, "", f"it cannot be read as text (UTF-8): {error}")
        return
    if rest or not count:
        yield _TextPiece(where, rest)


def _end(text: str) -> int:
    """Return the end of the last line, or of the last word of a single line: a tokenizer must see both whole."""
    return text.rfind("\n") + 1 or text.rfind(" ") + 1 or len(text)


def _windows(reading: Reading, stream: Array) -> ReadSamples:
    length = reading.spec.shape[0]
    count = max(0, len(stream) - 1) // length
    if not count and not reading.problems.count:
        raise DataError(
            f"{reading.source} has {len(stream)} tokens, and a sample of this federation takes {length + 1}: add text",
            tokens=len(stream),
        )
    x, y = (np.asarray(stream[at : at + count * length]).reshape(count, length) for at in (0, 1))
    return ReadSamples(x, y)
