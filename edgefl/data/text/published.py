"""Texts as they are published: what their files are called and where they come from, found in a folder or downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.data.download import Progress, fetch
from edgefl.wire.errors import DataError


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
