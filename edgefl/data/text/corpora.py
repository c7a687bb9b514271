"""Texts by name, as their files hold them: reviews, news, articles, plays.

Files are looked for under the names that they are published by, in the folders that
:func:`edgefl.data.datasets.places` lists. Parquet files are read by pyarrow (extra ``text``).
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.data.dataset import Array, limited_name, some
from edgefl.data.download import Progress, fetch
from edgefl.errors import ConfigError, DataError

# Texts as they are published: what their files are called and where they come from, found in a folder or downloaded.


class Missing(DataError):
    """A file that is in none of the folders that were searched."""


@dataclass(frozen=True)
class Published:
    """A corpus: ``folder`` below each of those that are searched, and its files by their MD5, at each of ``urls``."""

    name: str
    folder: str
    urls: tuple[str, ...]
    md5: Mapping[str, str]

    def find(self, places: Sequence[Path], names: Sequence[str]) -> Path:
        """The first file called one of ``names``, in the corpus' folder or directly in a place. Missing if there is none."""
        for folder in self._folders(places):
            for path in (folder / name for name in names):
                if path.is_file():
                    return path
        searched = ", ".join(str(place / self.folder) for place in places) or "no folder"
        raise Missing(
            f"{self.name} was not found: {' or '.join(names)} is not in {searched}; put it there, name the folder with "
            f"`data.dir` or EDGEFL_DATA, or allow the download (data.download = true) of {', '.join(self.md5)} from "
            f"{self.urls[0]}",
            dataset=self.name,
            searched=searched,
        )

    def download(self, target: Path, progress: Progress | None = None) -> None:
        """Fetch what the corpus' folder in ``target`` lacks, each file checked by MD5 before it appears under its name.

        DataError, with what to do, where no address has the published file.
        """
        folder = target / self.folder
        for name, md5 in self.md5.items():
            if not (folder / name).is_file():
                remedy = f"Put it into {folder}, or name its folder with `data.dir` or EDGEFL_DATA"
                fetch(self.urls, folder / name, md5, of=self.name, remedy=remedy, progress=progress)

    def _folders(self, places: Sequence[Path]) -> Iterator[Path]:
        for place in places:
            yield place / self.folder
            yield place


IMDB = Published(
    name="IMDB",
    folder="imdb",
    urls=("https://ai.stanford.edu/~amaas/data/sentiment/",),
    md5={"aclImdb_v1.tar.gz": "7c2ac02c03563afcf9b574c7e56c153a"},
)
AG_NEWS = Published(
    name="AG News",
    folder="ag_news",
    urls=("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",),
    md5={"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"},
)
WIKITEXT2 = Published(
    name="WikiText-2",
    folder="wikitext2",
    urls=("https://wikitext.smerity.com/", "https://s3.amazonaws.com/research.metamind.io/wikitext/"),
    md5={"wikitext-2-v1.zip": "542ccefacc6c27f945fb54453812b3cd"},
)
SHAKESPEARE = Published(
    name="Tiny Shakespeare",
    folder="tinyshakespeare",
    urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
    md5={"input.txt": "6fb458f1232090904fb40fe944165e91"},
)


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


@dataclass(frozen=True)
class _Source:
    """How a corpus is read from the folders that are searched: all of it, or else the ``part`` that is passed around."""

    published: Published
    whole: Callable[[Sequence[Path]], Corpus]
    part: Callable[[Sequence[Path]], Corpus] | None = None

    def read(self, places: Sequence[Path], target: Path | None, progress: Progress | None) -> Corpus:
        try:
            return self.whole(places)
        except Missing:
            if target is not None:
                self.published.download(target, progress)
                return self.whole((target,))
            if self.part is None:
                raise
            try:
                return self.part(places)
            except Missing:
                pass
            raise


def load(
    name: str, places: Sequence[Path], target: Path | None = None, *, progress: Progress | None = None
) -> Corpus:
    """The corpus ``name`` (one of :data:`CORPORA`). Where it is in none of ``places``, it is fetched into ``target``, if
    there is one. DataError if it is nowhere, or damaged."""
    source = CORPORA.get(name)
    if source is None:
        raise DataError(f"no texts {name!r}; there are: {', '.join(CORPORA)}", name=name)
    try:
        return source.read(tuple(places), target, progress)
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        csv.Error,
        tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(
            f"the files of {name} cannot be read: {error}; fetch them again", name=name
        ) from error


def _imdb(places: Sequence[Path]) -> Corpus:
    """As Parquet, or the archive of one file for each review."""
    (archive,) = IMDB.md5
    files = [
        IMDB.find(places, (f"{part}.parquet", f"{part}-00000-of-00001.parquet", archive))
        for part in ("train", "test")
    ]
    halves = (
        [_columns(file, "text", "label") for file in files]
        if all(file.suffix == ".parquet" for file in files)
        else _reviews(IMDB.find(places, (archive,)))
    )
    train, test = (_labelled(*half) for half in halves)
    return Corpus(IMDB.name, train, test, ("negative", "positive"))


_TOPICS = ("World", "Sports", "Business", "Sci/Tech")


def _ag_news(places: Sequence[Path]) -> Corpus:
    train = _news(AG_NEWS.find(places, ("train.csv", "train.csv.gz")))
    return _topics(train, places)


def _some_ag_news(places: Sequence[Path]) -> Corpus:
    return _topics(_columns(AG_NEWS.find(places, ("train_subset.parquet",)), "text", "label"), places)


def _topics(train: Sequence[list[Any]], places: Sequence[Path]) -> Corpus:
    test = _news(AG_NEWS.find(places, ("test.csv", "test.csv.gz")))
    some = len(train[0]) < 120_000
    name = f"{AG_NEWS.name} ({len(train[0]):,} of 120,000 training texts)" if some else AG_NEWS.name
    return Corpus(name, _labelled(*train), _labelled(*test), _TOPICS)


def _wikitext2(places: Sequence[Path]) -> Corpus:
    """As token files, or the archive that they are published in."""
    (archive,) = WIKITEXT2.md5
    train, test = (
        _articles(_text(WIKITEXT2.find(places, (*names, archive)), f"wikitext-2/{names[0]}"))
        for names in (("wiki.train.tokens", "train.txt.gz"), ("wiki.test.tokens", "test.txt.gz"))
    )
    return Corpus(WIKITEXT2.name, train, test)


def _some_wikitext2(places: Sequence[Path]) -> Corpus:
    """The partial copy has no training file; its validation file takes that place, and the name says so."""
    partial = replace(WIKITEXT2, folder="wikitext2_partial")
    train, test = (_articles(_text(partial.find(places, (f"{part}.txt.gz",)))) for part in ("valid", "test"))
    return Corpus(f"{WIKITEXT2.name} (its validation file as training set)", train, test)


def _shakespeare(places: Sequence[Path]) -> Corpus:
    """Speakers are owners; of each one's speeches in order, the last tenth is for testing."""
    path = SHAKESPEARE.find(places, ("input.txt", "input.txt.gz"))
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
    return Corpus(SHAKESPEARE.name, _owned(train), _owned(test))


CORPORA: Mapping[str, _Source] = {
    "imdb": _Source(IMDB, _imdb),
    "ag_news": _Source(AG_NEWS, _ag_news, _some_ag_news),
    "wikitext2": _Source(WIKITEXT2, _wikitext2, _some_wikitext2),
    "shakespeare": _Source(SHAKESPEARE, _shakespeare),
}
"""What reads each corpus."""


def _reviews(archive: Path) -> list[list[list[Any]]]:
    """Texts and classes of both parts, in the order of the files' names: ``aclImdb/train/pos/0_9.txt`` and so on."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    with tarfile.open(archive) as files:
        for member in files:
            _, part, kind, name = (*member.name.split("/"), "", "", "")[:4]
            if kind in ("neg", "pos") and member.isfile() and (file := files.extractfile(member)) is not None:
                found.setdefault((part, kind), []).append((name, file.read().decode("utf-8")))
    halves: list[list[list[Any]]] = []
    for part in ("train", "test"):
        kinds = [[text for _, text in sorted(found[part, kind])] for kind in ("neg", "pos")]
        halves.append([kinds[0] + kinds[1], [0] * len(kinds[0]) + [1] * len(kinds[1])])
    return halves


def _text(path: Path, member: str = "") -> str:
    """A file's text, gzipped or not; of an archive, that of its ``member``."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return archive.read(member).decode("utf-8")
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
