"""Texts as token numbers: by the tokenizer in the bundle (extra ``text``), or the bytes of UTF-8, which need nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from device_runtime.data.problems import BadRow, shown
from device_runtime.data.reading import NO_TEXT, Entry, Reading, Samples, is_text
from device_runtime.data.tables import Record, field, records
from edgefl.wire.bundle.readers import Text
from edgefl.wire.errors import BundleError, ConfigError, DataError
from edgefl.wire.tensors import Array

_RECORDS = (".csv", ".jsonl")
_TOGETHER = 1024
"""Texts that become tokens in one call of the tokenizer."""
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts as the token numbers of each."""


def read(reading: Reading, entries: tuple[Entry, ...]) -> Samples:
    """A sample for each text and its class; or windows of one long text, where labels are the tokens that follow."""
    reader, shape = reading.reader, reading.spec.shape
    assert isinstance(reader, Text)
    if len(shape) != 1:
        raise DataError(
            f"{reading.source}: texts become samples of shape (tokens,), the model takes {shape}: give arrays (.npz)",
            expected=shape,
        )
    running = reading.label.shape == shape
    kept = None if running else shape[0]
    texts = _running(reading, entries) if running else _labelled(reading, reader, entries)
    encode = encoder(reading, reader)
    tokens: list[Array] = []
    labels: list[float] = []
    while block := tuple(islice(texts, _TOGETHER)):
        rows = encode([text for _, text, _ in block])
        for (where, text, label), row in zip(block, rows, strict=True):
            try:
                tokens.append(np.array(_checked(reading, text, row)[:kept], np.int64))
                labels.append(label)
            except BadRow as bad:
                reading.problems.add(where, str(bad))
    return _windows(reading, tokens) if running else _padded(reading, reader, tokens, labels)


def encoder(reading: Reading, reader: Text) -> Encode:
    """ConfigError without the tokenizer's library, BundleError if the bundle's tokenizer is damaged."""
    if reader.tokenizer is None:
        return lambda texts: [list(text.encode("utf-8")) for text in texts]
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
    return lambda texts: [each.ids for each in made.encode_batch_fast(list(texts), add_special_tokens=False)]


def _checked(reading: Reading, text: str, row: Sequence[int]) -> Sequence[int]:
    if not text.strip() or not row:
        raise BadRow("the text is empty")
    below = reading.spec.below
    if below and max(row) >= below:
        raise BadRow(f"token {max(row)} is beyond the vocabulary, whose tokens are 0 to {below - 1}")
    return row


def _labelled(reading: Reading, reader: Text, entries: tuple[Entry, ...]) -> Iterator[tuple[str, str, float]]:
    """(where, text, label): a file in a class folder is a text; lines of others are ``label<TAB>text`` or records."""
    inside = tuple(each for each in entries if _is_text_of_class(each))
    for entry, number in reading.by_folder(inside) if inside else ():
        try:
            yield str(entry.path), _content(entry), number
        except BadRow as bad:
            reading.problems.add(str(entry.path), str(bad))
    for entry in (each for each in entries if not _is_text_of_class(each)):
        for line, record in _lines(entry, reader):
            where = f"{entry.path}, line {line}"
            try:
                text, label = _text(record, reader), reading.number(field(record, reader.label))
            except BadRow as bad:
                reading.problems.add(where, str(bad))
            else:
                yield where, text, label


def _is_text_of_class(entry: Entry) -> bool:
    return bool(entry.folder) and entry.path.suffix.lower() == ".txt"


def _lines(entry: Entry, reader: Text) -> Iterator[tuple[int, Record]]:
    if entry.path.suffix.lower() in _RECORDS:
        yield from records(entry.path, (reader.text, reader.label))
        return
    try:
        with entry.path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for line, content in enumerate(file, 1):
                if content.strip():
                    yield line, _record(content.removesuffix("\n"), reader)
    except OSError as error:
        raise DataError(f"{entry.path} cannot be read: {error}", path=str(entry.path)) from error


def _record(line: str, reader: Text) -> Record:
    if not is_text(line):
        return NO_TEXT
    label, tab, text = line.partition("\t")
    return {reader.label: label, reader.text: text} if tab else "it has no tab behind a label"


def _text(record: Record, reader: Text) -> str:
    text = field(record, reader.text)
    if not isinstance(text, str):
        raise BadRow(f"column {reader.text!r} is {shown(text)}, which is no text")
    if not is_text(text):
        raise BadRow(NO_TEXT)
    return text


def _running(reading: Reading, entries: tuple[Entry, ...]) -> Iterator[tuple[str, str, float]]:
    reader = reading.reader
    assert isinstance(reader, Text)
    for entry in entries:
        if entry.path.suffix.lower() not in _RECORDS:
            try:
                yield str(entry.path), _content(entry), 0
            except BadRow as bad:
                reading.problems.add(str(entry.path), str(bad))
            continue
        for line, record in records(entry.path, (reader.text,)):
            where = f"{entry.path}, line {line}"
            try:
                yield where, _text(record, reader), 0
            except BadRow as bad:
                reading.problems.add(where, str(bad))


def _content(entry: Entry) -> str:
    try:
        return entry.path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise BadRow(f"it cannot be read as text (UTF-8): {error}") from error


def _padded(reading: Reading, reader: Text, rows: Sequence[Array], labels: Sequence[float]) -> Samples:
    """``rows`` are no longer than a sample."""
    tokens, mask = np.zeros((2, len(rows), reading.spec.shape[0]), np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, 1
    others = {}
    for each in reading.spec.others:
        if each.name != reader.mask:
            raise DataError(
                f"{reading.source}: a text gives no input {each.name!r}, which the model reads: give arrays (.npz)"
            )
        others[each.name] = mask.astype(each.dtype)
    kind = np.float64 if reading.label.floats else np.int64
    return Samples(tokens.astype(reading.spec.dtype), np.array(labels, kind), others)


def _windows(reading: Reading, rows: Sequence[Array]) -> Samples:
    """Windows that lie end to end in all texts, one after the other, and the tokens that follow each."""
    length = reading.spec.shape[0]
    stream = np.concatenate([np.zeros(0, np.int64), *rows])
    count = max(0, len(stream) - 1) // length
    if not count and not reading.problems.count:
        raise DataError(
            f"{reading.source} has {len(stream)} tokens, and a sample of this federation takes {length + 1}: add text",
            tokens=len(stream),
        )
    x = stream[: count * length].reshape(count, length)
    y = stream[1 : count * length + 1].reshape(count, length)
    return Samples(x.astype(reading.spec.dtype), y)
