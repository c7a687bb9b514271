"""Published text corpora by name: reviews, news, articles, plays.

Files are searched under their published names, in the folders that :func:`edgefl.data.datasets.places` returns. Parquet
files are read by pyarrow (extra ``text``).
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

from edgefl.data.dataset import Array, choose, limited_name
from edgefl.data.download import Progress, fetch
from edgefl.errors import ConfigError, DataError

# Texts as they are published: what their files are called and where they come from, found in a folder or downloaded.


class CorpusMissing(DataError):
    """Error for a published corpus of which none of the searched folders has a file."""


@dataclass(frozen=True)
class PublishedCorpus:
    """Description of a published corpus: names, sources and checksums of its files.

    Attributes:
        name: Name of the corpus.
        folder: Subfolder for its files.
        urls: URLs of folders that contain the files.
        md5: MD5 of each file by its name.
    """

    name: str
    folder: str
    urls: tuple[str, ...]
    md5: Mapping[str, str]

    def find(self, places: Sequence[Path], names: Sequence[str]) -> Path:
        """Return the path of the first file found.

        Args:
            places: Folders to search, each after its subfolder ``folder``.
            names: Names of the file, in the order of preference.

        Raises:
            CorpusMissing: No folder has such a file.
        """
        for folder in self._folders(places):
            for path in (folder / name for name in names):
                if path.is_file():
                    return path
        searched = ", ".join(str(place / self.folder) for place in places) or "no folder"
        raise CorpusMissing(
            f"{self.name} was not found: {' or '.join(names)} is not in {searched}; put it there, name the folder with "
            f"`data.dir` or EDGEFL_DATA, or allow the download (data.download = true) of {', '.join(self.md5)} from "
            f"{self.urls[0]}",
            dataset=self.name,
            searched=searched,
        )

    def download(self, target: Path, progress: Progress | None = None) -> None:
        """Download the missing files into the corpus' folder in ``target``. Each is verified by its MD5.

        Args:
            target: Parent folder.
            progress: Called with file name, bytes so far and bytes in all (0: unknown). None: print the progress.

        Raises:
            DataError: No URL has a file with its published MD5. The message has the remedy.
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
    """Texts in order, such as the training half of a corpus.

    Attributes:
        texts: Texts.
        labels: Class number of each text, int64 (n,). None: the texts have no classes.
        owners: Number of each text's author or speaker, int64 (n,). None: unknown.
    """

    texts: Sequence[str]
    labels: Array | None = None
    owners: Array | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Array) -> Texts:
        """Return the texts at the positions ``rows``, with their labels and owners."""
        return Texts(
            [self.texts[row] for row in rows],
            None if self.labels is None else self.labels[rows],
            None if self.owners is None else self.owners[rows],
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and test texts of a corpus.

    Attributes:
        name: Exact name, for results and logs.
        train: Texts for training.
        test: Texts for testing.
        classes: Names of the classes. Empty if the texts have no labels.
    """

    name: str
    train: Texts
    test: Texts
    classes: tuple[str, ...] = ()

    def limited(self, train: int, test: int, seed: int) -> Corpus:
        """Return a corpus with a random subset of the texts, or this one if the limits exclude none.

        The name of a subset contains the numbers of texts.

        Args:
            train: Most training texts. 0: all.
            test: Most test texts. 0: all.
            seed: Seed of the choice.
        """
        rng = np.random.default_rng(seed)
        rows, held_out = (
            choose(rng, len(part), most) for part, most in ((self.train, train), (self.test, test))
        )
        if (len(rows), len(held_out)) == (len(self.train), len(self.test)):
            return self
        name = limited_name(self.name, len(rows), len(held_out))
        return Corpus(name, self.train.at(rows), self.test.at(held_out), self.classes)


_Reader = Callable[[Sequence[Path]], Corpus]


def load(
    name: str, places: Sequence[Path], target: Path | None = None, *, progress: Progress | None = None
) -> Corpus:
    """Load a corpus by name.

    Args:
        name: One of :data:`CORPORA`.
        places: Folders to search.
        target: Folder for the download if no folder has the corpus. None: do not download, but read the well-known
            partial copy if one is found.
        progress: Called with file name, bytes so far and bytes in all (0: unknown). None: print the progress.

    Raises:
        DataError: The name is unknown, no folder has the corpus, the download failed, or files are damaged.
        ConfigError: The file is Parquet, and pyarrow is not installed.
    """
    if name not in CORPORA:
        raise DataError(f"no texts {name!r}; there are: {', '.join(CORPORA)}", name=name)
    read, read_part = _READERS[name]
    try:
        try:
            return read(places)
        except CorpusMissing:
            if target is not None:
                CORPORA[name].download(target, progress)
                return read((target,))
            if read_part is not None:
                with suppress(CorpusMissing):
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
    """Read IMDB from Parquet files, or from the published archive with one file per review."""
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
    train, test = (_with_labels(*half) for half in halves)
    return Corpus(IMDB.name, train, test, ("negative", "positive"))


_TOPICS = ("World", "Sports", "Business", "Sci/Tech")


def _ag_news(places: Sequence[Path]) -> Corpus:
    train = _news(AG_NEWS.find(places, ("train.csv", "train.csv.gz")))
    return _topics(train, places)


def _some_ag_news(places: Sequence[Path]) -> Corpus:
    """Read the partial copy of AG News, with a subset of its training texts."""
    return _topics(_columns(AG_NEWS.find(places, ("train_subset.parquet",)), "text", "label"), places)


def _topics(train: Sequence[list[Any]], places: Sequence[Path]) -> Corpus:
    """Return the corpus AG News with ``train`` (texts, class numbers) and the published test texts, found in ``places``.

    The name contains the number of training texts if some are missing.
    """
    test = _news(AG_NEWS.find(places, ("test.csv", "test.csv.gz")))
    some = len(train[0]) < 120_000
    name = f"{AG_NEWS.name} ({len(train[0]):,} of 120,000 training texts)" if some else AG_NEWS.name
    return Corpus(name, _with_labels(*train), _with_labels(*test), _TOPICS)


def _wikitext2(places: Sequence[Path]) -> Corpus:
    """Read WikiText-2 from token files, or from the published archive."""
    (archive,) = WIKITEXT2.md5
    train, test = (
        _articles(_text(WIKITEXT2.find(places, (*names, archive)), f"wikitext-2/{names[0]}"))
        for names in (("wiki.train.tokens", "train.txt.gz"), ("wiki.test.tokens", "test.txt.gz"))
    )
    return Corpus(WIKITEXT2.name, train, test)


def _some_wikitext2(places: Sequence[Path]) -> Corpus:
    """Return the partial copy of WikiText-2. Its validation file replaces the missing training file.

    The name of the corpus says so.
    """
    partial = replace(WIKITEXT2, folder="wikitext2_partial")
    train, test = (_articles(_text(partial.find(places, (f"{part}.txt.gz",)))) for part in ("valid", "test"))
    return Corpus(f"{WIKITEXT2.name} (its validation file as training set)", train, test)


def _shakespeare(places: Sequence[Path]) -> Corpus:
    """Read the plays with speakers as owners. The last tenth of each speaker's speeches, in order, is for testing."""
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
    return Corpus(SHAKESPEARE.name, _with_owners(train), _with_owners(test))


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
"""Functions that read each corpus from the searched folders: the complete one, and a well-known partial copy or None."""


def _reviews(archive: Path) -> list[list[list[Any]]]:
    """Return IMDB's training part and its test part, each as ``[texts, class numbers]``, from the published archive.

    In each, all negative reviews (class 0) precede the positive ones (1), both in the order of the file names.
    """
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
    """Return the text of the file ``path``, which may be gzipped, or of the entry ``member`` of a zip archive."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return archive.read(member).decode("utf-8")
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")


def _columns(path: Path, *names: str) -> list[list[Any]]:
    """Return the named columns of a Parquet file, each as a list.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path.name} is read by pyarrow, which is not installed: pip install 'edgefl-tiers[text]'"
        ) from error
    table = parquet.read_table(path, columns=list(names))
    return [table.column(name).to_pylist() for name in names]


def _news(path: Path) -> tuple[list[str], list[int]]:
    """Return (texts, class numbers from 0) of a published AG News file, a CSV of class from 1, title and description."""
    rows = [row for row in csv.reader(io.StringIO(_text(path))) if row]
    return [f"{title} {text}" for _, title, text in rows], [int(label) - 1 for label, _, _ in rows]


def _articles(text: str) -> Texts:
    """Split WikiText into articles, each with an owner number of its own.

    An article begins with a heading `` = Title = ``.
    """
    heads = [match.start() for match in re.finditer(r"(?m)^ = [^=].*? = $", text)]
    ends = [*heads[1:], len(text)]
    found = (
        [text[start:end].strip() for start, end in zip(heads, ends, strict=True)] if heads else [text.strip()]
    )
    return _with_owners(enumerate(found))


def _with_labels(texts: Sequence[str], labels: Sequence[int]) -> Texts:
    return Texts(texts, np.array(labels, np.int64))


def _with_owners(pairs: Iterable[tuple[int, str]]) -> Texts:
    """Return texts with owners, from pairs (owner number, text)."""
    listed = list(pairs)
    return Texts([text for _, text in listed], owners=np.array([who for who, _ in listed], np.int64))
