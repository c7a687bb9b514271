"""Texts by name, as in their published files: reviews, news, articles, plays.

Files are searched under the names of their publication, in the folders that :func:`edgefl.data.datasets.places` lists.
pyarrow reads Parquet files (extra ``text``).
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
class PublishedCorpus:
    """Published corpus: its ``folder`` below each searched one, and its files by their MD5, at each of ``urls``."""

    name: str
    folder: str
    urls: tuple[str, ...]
    md5: Mapping[str, str]

    def find(self, places: Sequence[Path], names: Sequence[str]) -> Path:
        """Return the first file with one of ``names``, in the corpus' folder or in a place; raise Missing without one."""
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
        """Download the missing files of the corpus' folder in ``target``, each checked by MD5 before it appears under
        its name.

        Raises:
            DataError: no address has the published file; the message has the remedy.
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


IMDB = PublishedCorpus(
    name="IMDB",
    folder="imdb",
    urls=("https://ai.stanford.edu/~amaas/data/sentiment/",),
    md5={"aclImdb_v1.tar.gz": "7c2ac02c03563afcf9b574c7e56c153a"},
)
AG_NEWS = PublishedCorpus(
    name="AG News",
    folder="ag_news",
    urls=("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",),
    md5={"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"},
)
WIKITEXT2 = PublishedCorpus(
    name="WikiText-2",
    folder="wikitext2",
    urls=("https://wikitext.smerity.com/", "https://s3.amazonaws.com/research.metamind.io/wikitext/"),
    md5={"wikitext-2-v1.zip": "542ccefacc6c27f945fb54453812b3cd"},
)
SHAKESPEARE = PublishedCorpus(
    name="Tiny Shakespeare",
    folder="tinyshakespeare",
    urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
    md5={"input.txt": "6fb458f1232090904fb40fe944165e91"},
)


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts in order; ``labels`` int64 (n,) if each has a class, ``owners`` int64 (n,) of their authors or speakers."""

    texts: Sequence[str]
    labels: Array | None = None
    owners: Array | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Array) -> Texts:
        """Return the texts at these positions."""
        return Texts(
            [self.texts[row] for row in rows],
            None if self.labels is None else self.labels[rows],
            None if self.owners is None else self.owners[rows],
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Corpus with its exact ``name``, and ``classes``, the names of the labels; none if there are no labels."""

    name: str
    train: Texts
    test: Texts
    classes: tuple[str, ...] = ()

    def limited(self, train: int, test: int, seed: int) -> Corpus:
        """Return at most ``train`` and ``test`` texts, drawn by ``seed`` (0: all of them), with a name that says so."""
        rng = np.random.default_rng(seed)
        rows, held_out = (
            some(rng, len(part), most) for part, most in ((self.train, train), (self.test, test))
        )
        if (len(rows), len(held_out)) == (len(self.train), len(self.test)):
            return self
        name = limited_name(self.name, len(rows), len(held_out))
        return Corpus(name, self.train.at(rows), self.test.at(held_out), self.classes)


_Reader = Callable[[Sequence[Path]], Corpus]


def load(
    name: str, places: Sequence[Path], target: Path | None = None, *, progress: Progress | None = None
) -> Corpus:
    """Load the corpus ``name`` (one of :data:`CORPORA`).

    If no place has it, it is downloaded into ``target``. Without a target, the partial copy that is passed around is read.

    Raises:
        DataError: no place has the corpus, or it is damaged.
    """
    if name not in CORPORA:
        raise DataError(f"no texts {name!r}; there are: {', '.join(CORPORA)}", name=name)
    read, read_part = _READERS[name]
    try:
        try:
            return read(places)
        except Missing:
            if target is not None:
                CORPORA[name].download(target, progress)
                return read((target,))
            if read_part is not None:
                with suppress(Missing):
                    return read_part(places)
            raise
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
    """Read IMDB as Parquet, or as the archive of one file for each review."""
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
    """Read WikiText-2 as token files, or as the archive of their publication."""
    (archive,) = WIKITEXT2.md5
    train, test = (
        _articles(_text(WIKITEXT2.find(places, (*names, archive)), f"wikitext-2/{names[0]}"))
        for names in (("wiki.train.tokens", "train.txt.gz"), ("wiki.test.tokens", "test.txt.gz"))
    )
    return Corpus(WIKITEXT2.name, train, test)


def _some_wikitext2(places: Sequence[Path]) -> Corpus:
    """Read the partial copy of WikiText-2, whose validation file replaces the missing training file; the name says so."""
    partial = replace(WIKITEXT2, folder="wikitext2_partial")
    train, test = (_articles(_text(partial.find(places, (f"{part}.txt.gz",)))) for part in ("valid", "test"))
    return Corpus(f"{WIKITEXT2.name} (its validation file as training set)", train, test)


def _shakespeare(places: Sequence[Path]) -> Corpus:
    """Read the plays with speakers as owners; the last tenth of each one's speeches, in order, is for tests."""
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


CORPORA: Mapping[str, PublishedCorpus] = {
    "imdb": IMDB,
    "ag_news": AG_NEWS,
    "wikitext2": WIKITEXT2,
    "shakespeare": SHAKESPEARE,
}
_READERS: Mapping[str, tuple[_Reader, _Reader | None]] = {
    "imdb": (_imdb, None),
    "ag_news": (_ag_news, _some_ag_news),
    "wikitext2": (_wikitext2, _some_wikitext2),
    "shakespeare": (_shakespeare, None),
}
"""Functions that read each corpus in the searched folders: all of it, and the partial copy that is passed around."""


def _reviews(archive: Path) -> list[list[list[Any]]]:
    """Return texts and classes of both parts, in the order of the files' names: ``aclImdb/train/pos/0_9.txt`` and so on."""
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
    """Return a file's text, gzipped or not; of an archive, that of its ``member``."""
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
    """Read AG News as published: class from 1, title, description."""
    rows = [row for row in csv.reader(io.StringIO(_text(path))) if row]
    return [f"{title} {text}" for _, title, text in rows], [int(label) - 1 for label, _, _ in rows]


def _articles(text: str) -> Texts:
    """Return a text for each article, which begins with a heading of one level, `` = Title = ``."""
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
