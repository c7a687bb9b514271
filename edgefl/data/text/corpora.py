"""Texts by name, as their files hold them: reviews, news, articles, plays.

Files are looked for under the names that they are published by, in the folders that
:func:`edgefl.data.datasets.places` lists. Parquet files are read by pyarrow (extra ``text``).
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.data.dataset import Array, limited_name, some
from edgefl.wire.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts in order; ``labels`` int64 (n,) where each has a class, ``owners`` int64 (n,) who wrote or said it."""

    texts: Sequence[str]
    labels: Array | None = None
    owners: Array | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Array) -> Texts:
        """The texts at these places."""
        return Texts(
            [self.texts[row] for row in rows],
            None if self.labels is None else self.labels[rows],
            None if self.owners is None else self.owners[rows],
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """``name`` says exactly which texts these are. ``classes``: the names of the labels, none where there are no labels."""

    name: str
    train: Texts
    test: Texts
    classes: tuple[str, ...] = ()

    def limited(self, train: int, test: int, seed: int) -> Corpus:
        """At most ``train`` and ``test`` texts, drawn by ``seed`` (0: all of them); the name says so."""
        rng = np.random.default_rng(seed)
        rows, held_out = (
            some(rng, len(part), most) for part, most in ((self.train, train), (self.test, test))
        )
        if (len(rows), len(held_out)) == (len(self.train), len(self.test)):
            return self
        name = limited_name(self.name, len(rows), len(held_out))
        return Corpus(name, self.train.at(rows), self.test.at(held_out), self.classes)


def load(name: str, places: Sequence[Path]) -> Corpus:
    """The corpus ``name`` (one of :data:`CORPORA`). DataError if its files are in none of ``places``, or damaged."""
    read = CORPORA.get(name)
    if read is None:
        raise DataError(f"no texts {name!r}; there are: {', '.join(CORPORA)}", name=name)
    try:
        return read(tuple(places))
    except (OSError, EOFError, ValueError, KeyError, csv.Error) as error:
        raise DataError(
            f"the files of {name} cannot be read: {error}; fetch them again", name=name
        ) from error


def _imdb(places: Sequence[Path]) -> Corpus:
    train, test = (
        _columns(
            _found("IMDB", places, "imdb", (f"{part}.parquet", f"{part}-00000-of-00001.parquet")),
            "text",
            "label",
        )
        for part in ("train", "test")
    )
    return Corpus("IMDB", _labelled(*train), _labelled(*test), ("negative", "positive"))


def _ag_news(places: Sequence[Path]) -> Corpus:
    folder, classes = "ag_news", ("World", "Sports", "Business", "Sci/Tech")
    path = _found("AG News", places, folder, ("train.csv", "train.csv.gz", "train_subset.parquet"))
    parquet = path.suffix == ".parquet"
    train = _columns(path, "text", "label") if parquet else _news(path)
    test = _news(_found("AG News", places, folder, ("test.csv", "test.csv.gz")))
    name = f"AG News ({len(train[0]):,} of 120,000 training texts)" if len(train[0]) < 120_000 else "AG News"
    return Corpus(name, _labelled(*train), _labelled(*test), classes)


def _wikitext2(places: Sequence[Path]) -> Corpus:
    """The partial copy has no training file; its validation file takes that place, and the name says so."""
    try:
        train, name = (
            _found("WikiText-2", places, "wikitext2", ("wiki.train.tokens", "train.txt.gz")),
            "WikiText-2",
        )
        test = _found("WikiText-2", places, "wikitext2", ("wiki.test.tokens", "test.txt.gz"))
    except DataError:
        folder, name = "wikitext2_partial", "WikiText-2 (its validation file as training set)"
        train = _found("WikiText-2", places, folder, ("valid.txt.gz",))
        test = _found("WikiText-2", places, folder, ("test.txt.gz",))
    return Corpus(name, _articles(_text(train)), _articles(_text(test)))


def _shakespeare(places: Sequence[Path]) -> Corpus:
    """Speakers are owners; of each one's speeches in order, the last tenth is for testing."""
    path = _found("Tiny Shakespeare", places, "tinyshakespeare", ("input.txt", "input.txt.gz"))
    speakers: dict[str, list[str]] = {}
    for speech in re.split(r"\n\s*\n", _text(path).strip()):
        who, colon, said = speech.partition(":\n")
        if colon and said.strip():
            speakers.setdefault(who.strip(), []).append(said.strip() + "\n")
    train: list[tuple[int, str]] = []
    test: list[tuple[int, str]] = []
    for number, said in enumerate(speakers.values()):
        held_out = max(1, len(said) // 10) if len(said) > 1 else 0
        train += [(number, text) for text in said[: len(said) - held_out]]
        test += [(number, text) for text in said[len(said) - held_out :]]
    return Corpus("Tiny Shakespeare", _owned(train), _owned(test))


CORPORA: Mapping[str, Callable[[Sequence[Path]], Corpus]] = {
    "imdb": _imdb,
    "ag_news": _ag_news,
    "wikitext2": _wikitext2,
    "shakespeare": _shakespeare,
}
"""What reads each corpus from the folders that are searched."""


def _found(title: str, places: Sequence[Path], folder: str, names: Sequence[str]) -> Path:
    for place in places:
        for path in (base / name for base in (place / folder, place) for name in names):
            if path.is_file():
                return path
    searched = ", ".join(str(place / folder) for place in places) or "no folder"
    raise DataError(
        f"{title} was not found: {' or '.join(names)} is not in {searched}; name the folder with `data.dir` or EDGEFL_DATA",
        dataset=title,
        searched=searched,
    )


def _text(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")


def _columns(path: Path, *names: str) -> list[list[Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path.name} is read by pyarrow, which is not installed: pip install 'edgefl-tiers[text]'"
        ) from error
    table = parquet.read_table(path, columns=list(names))
    return [table.column(name).to_pylist() for name in names]


def _news(path: Path) -> tuple[list[str], list[int]]:
    """Class from 1, title, description: as AG News is published."""
    rows = [row for row in csv.reader(io.StringIO(_text(path))) if row]
    return [f"{title} {text}" for _, title, text in rows], [int(label) - 1 for label, _, _ in rows]


def _articles(text: str) -> Texts:
    """A text for each article; they begin with a heading of one level, `` = Title = ``."""
    heads = [match.start() for match in re.finditer(r"(?m)^ = [^=].*? = $", text)]
    ends = [*heads[1:], len(text)]
    found = (
        [text[start:end].strip() for start, end in zip(heads, ends, strict=True)] if heads else [text.strip()]
    )
    return _owned(enumerate(found))


def _labelled(texts: Sequence[str], labels: Sequence[int]) -> Texts:
    return Texts(texts, np.array(labels, np.int64))


def _owned(pairs: Iterable[tuple[int, str]]) -> Texts:
    listed = list(pairs)
    return Texts([text for _, text in listed], owners=np.array([who for who, _ in listed], np.int64))
