"""Reader of texts as tokens: padded samples with a class, or windows of running text for language models."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from edgefl.errors import BundleError, ConfigError, DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import TextSpec
from edgefl.wire.records import NOT_TEXT, RECORDS, BadRow, Record, field, is_text, records, text_of
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, ReadContext, ReadSamples
from edgefl_device.data.spool import Spool

_TOGETHER = 1024
"""Texts that become tokens in one call of the tokenizer."""


def read_texts(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return one padded sample for each labelled text, or windows of running text whose labels are the next tokens.

    The label's shape decides: windows if it equals the sample's shape.
    """
    reader, shape = reading.reader, reading.spec.shape
    assert isinstance(reader, TextSpec)
    if len(shape) != 1:
        raise DataError(
            f"{reading.source}: texts become samples of shape (tokens,), the model takes {shape}: give arrays (.npz)",
            expected=shape,
        )
    if reading.label.shape == shape:
        return _read_windows(reading, reader, entries)
    for each in reading.spec.others:
        if each.name != reader.mask:
            raise DataError(
                f"{reading.source}: a text gives no input {each.name!r}, which the model reads: give arrays (.npz)"
            )
    tokens = Spool(storage_dtype(reading.spec), shape)
    mask = Spool("uint8", shape)
    labels = array("d")
    texts, encode = _read_labelled(reading, reader, entries), encoder(reading, reader)
    while block := tuple(islice(texts, _TOGETHER)):
        good: list[Array] = []
        for (where, text, label), row in zip(block, encode([text for _, text, _ in block]), strict=True):
            try:
                good.append(_checked(reading, text, row)[: shape[0]])
                labels.append(label)
            except BadRow as bad:
                reading.problems.add(where, str(bad))
        for spool, rows in zip((tokens, mask), _pad(good, shape[0]), strict=True):
            spool.extend(rows)
    kind = np.float64 if reading.label.floats else np.int64
    beside = {each.name: mask.array() for each in reading.spec.others}
    return ReadSamples(tokens.array(), np.array(labels, kind), beside)


def _checked(reading: ReadContext, text: str, row: Array) -> Array:
    if not text.strip() or not row.size:
        raise BadRow("the text is empty")
    check_vocabulary(reading.spec, row)
    return row


def _pad(rows: Sequence[Array], length: int) -> tuple[Array, Array]:
    """Return ``rows`` padded with zeros to ``length``, and the mask of real tokens; both (n, length)."""
    tokens, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.uint8)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, 1
    return tokens, mask


def _read_labelled(
    reading: ReadContext, reader: TextSpec, entries: tuple[FileEntry, ...]
) -> Iterator[tuple[str, str, float]]:
    """Yield (where, text, label): a file in a class folder is one text; lines of other files are ``label<TAB>text`` or
    records.
    """
    inside = tuple(each for each in entries if _is_text_of_class(each))
    for entry, number in reading.by_folder(inside) if inside else ():
        try:
            text = entry.path.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError) as error:
            reading.problems.add(str(entry.path), f"it cannot be read as text (UTF-8): {error}")
        else:
            yield str(entry.path), text, number
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
    entry: FileEntry, reader: TextSpec, is_label: Callable[[str], bool]
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


def _record(line: str, reader: TextSpec) -> Record:
    if not is_text(line):
        return NOT_TEXT
    label, tab, text = line.partition("\t")
    return {reader.label: label, reader.text: text} if tab else "it has no tab behind a label"


Encode = Callable[[Sequence[str]], Sequence[Array]]
"""Texts as the token numbers of each, (tokens,)."""


def encoder(reading: ReadContext, reader: TextSpec) -> Encode:
    """Return the function that turns texts into arrays of tokens: the reader's tokenizer, or UTF-8 bytes without one.

    Raises:
        ConfigError: The library ``tokenizers`` is not installed.
        BundleError: The bundle's tokenizer is damaged.
    """
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
    """Raise BadRow if ``tokens`` contain one beyond the model's vocabulary."""
    if spec.below and tokens.size and tokens.max() >= spec.below:
        raise BadRow(f"token {tokens.max()} is beyond the vocabulary, whose tokens are 0 to {spec.below - 1}")


def storage_dtype(spec: DataSpec) -> np.dtype:
    """Return the smallest dtype that holds the vocabulary's tokens, for storage; batches are converted to the model's
    dtype.
    """
    own = np.dtype(spec.dtype)
    return np.min_scalar_type(spec.below - 1) if spec.below and own.kind in "iu" else own


_PIECES_TOGETHER = 1024
"""Pieces that become tokens in one call of the tokenizer."""
PIECE = 1 << 20
"""Characters of a text that are read together, and become tokens in one call."""


class _TextPiece(NamedTuple):
    """Piece of the text ``where``; ``problem`` is why it cannot be read, "" if it can."""

    where: str
    text: str
    problem: str = ""


def _read_windows(reading: ReadContext, reader: TextSpec, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return windows over all texts, concatenated, and the token after each. A text with a problem is left out whole."""
    tokens = Spool(storage_dtype(reading.spec))
    encode = encoder(reading, reader)
    pieces = (
        pair
        for block in _blocks(_pieces(reader, entries))
        for pair in zip(block, encode([piece.text for piece in block]), strict=True)
    )
    for where, text in groupby(pieces, lambda pair: pair[0].where):
        begin = len(tokens)
        try:
            _append(reading, text, tokens)
        except BadRow as bad:
            tokens.truncate(begin)
            reading.problems.add(where, str(bad))
    return _windows(reading, tokens.array())


def _append(reading: ReadContext, text: Iterable[tuple[_TextPiece, Array]], tokens: Spool) -> None:
    begin, blank = len(tokens), True
    for piece, row in text:
        if piece.problem:
            raise BadRow(piece.problem)
        check_vocabulary(reading.spec, row)
        tokens.extend(row)
        blank = blank and not piece.text.strip()
    if blank or len(tokens) == begin:
        raise BadRow("the text is empty")


def _blocks(pieces: Iterable[_TextPiece]) -> Iterator[list[_TextPiece]]:
    block: list[_TextPiece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text)
        if len(block) == _PIECES_TOGETHER or size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _pieces(reader: TextSpec, entries: tuple[FileEntry, ...]) -> Iterator[_TextPiece]:
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
    """Return the position after the last whole line of ``text``, else after its last whole word, so that no tokenizer
    input is cut.
    """
    return text.rfind("\n") + 1 or text.rfind(" ") + 1 or len(text)


def _windows(reading: ReadContext, stream: Array) -> ReadSamples:
    length = reading.spec.shape[0]
    count = max(0, len(stream) - 1) // length
    if not count and not reading.problems.count:
        raise DataError(
            f"{reading.source} has {len(stream)} tokens, and a sample of this federation takes {length + 1}: add text",
            tokens=len(stream),
        )
    x, y = (np.asarray(stream[at : at + count * length]).reshape(count, length) for at in (0, 1))
    return ReadSamples(x, y)
