"""Texts: their files as they are published, their words as numbers, and the samples that are made of them."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow import Table, parquet

from edgefl.config import parse
from edgefl.data.dataset import Dataset
from edgefl.data.download import md5_of
from edgefl.data.partition import by_owners
from edgefl.data.text import corpora, samples, vocabulary
from edgefl.data.text.corpora import Corpus, PublishedCorpus, Texts
from edgefl.data.text.samples import unigram_perplexity
from edgefl.data.text.vocabulary import Vocabulary
from edgefl.setup.data import open_data, partition
from edgefl.setup.evaluation import perplexity_to_beat
from edgefl.setup.model import federation_model
from tests.support.errors import ConfigError, DataError, refuses

PLAY = "\n\n".join(
    f"{who}:\n{said} again and again"
    for number in range(12)
    for who, said in (("First Citizen", f"Hear me {number}"), ("All", f"Speak {number}"))
)
ARTICLES = " \n = Lobster = \n \n It is large . \n \n = = Name = = \n \n From old words . \n = Crab = \n \n Small . \n"


def written(folder: Path) -> Path:
    """One small file of each corpus, in the folders and under the names that are looked for."""
    reviews = {"text": ["A fine, fine film.", "Bad!", "", "So so film"], "label": [1, 0, 0, 1]}
    for place in ("imdb", "ag_news", "wikitext2", "tinyshakespeare"):
        (folder / place).mkdir()
    for part in ("train", "test"):
        parquet.write_table(Table.from_pydict(reviews), folder / "imdb" / f"{part}.parquet")
    news = '"3","Fears for pension","Unions say they are ""disappointed""."\n"1","Summit","Leaders meet."\n'
    (folder / "ag_news" / "train.csv").write_text(news)
    (folder / "ag_news" / "test.csv.gz").write_bytes(gzip.compress(news.encode()))
    for part in ("train", "test"):
        (folder / "wikitext2" / f"wiki.{part}.tokens").write_text(ARTICLES)
    (folder / "tinyshakespeare" / "input.txt").write_text(PLAY)
    return folder


@pytest.mark.parametrize(
    ("name", "called", "train", "classes", "owners"),
    [
        ("imdb", "IMDB", 4, 2, None),
        ("ag_news", "AG News (2 of 120,000 training texts)", 2, 4, None),
        ("wikitext2", "WikiText-2", 2, 0, 2),
        ("shakespeare", "Tiny Shakespeare", 22, 0, 2),
    ],
)
def test_a_corpus_is_read_as_it_is_published(
    tmp_path: Path, name: str, called: str, train: int, classes: int, owners: int | None
) -> None:
    corpus = corpora.load(name, [tmp_path / "nowhere", written(tmp_path)])

    assert (corpus.name, len(corpus.train), len(corpus.classes)) == (called, train, classes)
    assert (corpus.train.labels is None) == (classes == 0)
    found = None if corpus.train.owners is None else len(np.unique(corpus.train.owners))
    assert found == owners


def test_parts_that_are_passed_around_say_so(tmp_path: Path) -> None:
    (tmp_path / "wikitext2_partial").mkdir()
    for part in ("valid", "test"):
        (tmp_path / "wikitext2_partial" / f"{part}.txt.gz").write_bytes(gzip.compress(ARTICLES.encode()))
    assert corpora.load("wikitext2", [tmp_path]).name == "WikiText-2 (its validation file as training set)"

    written(tmp_path)
    (tmp_path / "ag_news" / "train.csv").unlink()
    some = Table.from_pydict({"text": ["A", "B", "C"], "label": [0, 1, 3]})
    parquet.write_table(some, tmp_path / "ag_news" / "train_subset.parquet")
    assert corpora.load("ag_news", [tmp_path]).name == "AG News (3 of 120,000 training texts)"
    assert corpora.load("wikitext2", [tmp_path]).name == "WikiText-2"


def _published(folder: Path) -> dict[str, PublishedCorpus]:
    """Each corpus as it lies on a server, with the checksums that it has there."""
    folder.mkdir()
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for name in ("train/neg/1_2", "train/pos/0_9", "test/pos/0_10", "test/neg/0_1", "train/unsup/0_0"):
            member = tarfile.TarInfo(f"aclImdb/{name}.txt")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    with zipfile.ZipFile(folder / "wikitext-2-v1.zip", "w") as packed:
        for part in ("train", "valid", "test"):
            packed.writestr(f"wikitext-2/wiki.{part}.tokens", ARTICLES)
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text('"1","Summit","Leaders meet."\n')
    (folder / "input.txt").write_text(PLAY)
    urls = (folder.parent.as_uri() + "/nowhere/", folder.as_uri() + "/")
    own = {}
    for key, source in corpora.CORPORA.items():
        md5 = {name: md5_of(folder / name) for name in source.md5}
        own[key] = replace(source, urls=urls, md5=md5)
    return own


@pytest.mark.parametrize("name", sorted(corpora.CORPORA))
def test_a_corpus_is_fetched_and_checked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, said = tmp_path / "here", tmp_path / "there", list[str]()
    published = _published(there)[name]

    def load(source: PublishedCorpus) -> Corpus:
        monkeypatch.setitem(corpora.CORPORA, name, source)  # type: ignore[attr-defined]
        return corpora.load(name, [here], here, progress=lambda file, *_: said.append(file))

    with pytest.raises(DataError, match=r"cannot download .*MD5 is .* published is .*Put it into"):
        load(replace(published, md5=dict.fromkeys(published.md5, "0" * 32)))
    assert not [path for path in here.rglob("*") if path.is_file()]
    first = load(published)
    assert {*said} == {*published.md5} and len(first.train) and len(first.test)
    for file in there.iterdir():
        file.unlink()
    again = load(published)
    assert (again.name, again.train.texts, again.test.texts) == (
        first.name,
        first.train.texts,
        first.test.texts,
    )


def test_reviews_are_in_order_and_unclassified_ones_left_out(tmp_path: Path) -> None:
    _published(tmp_path / "imdb")
    corpus = corpora.load("imdb", [tmp_path])

    assert corpus.train.texts == ["train/neg/1_2", "train/pos/0_9"]
    assert corpus.test.texts == ["test/neg/0_1", "test/pos/0_10"]
    assert corpus.train.labels is not None and corpus.train.labels.tolist() == [0, 1]


NAMES = {
    "fashion_mnist": {"Fashion-MNIST"},
    "mnist": {"MNIST"},
    "cifar10_jpeg": {"CIFAR-10 (JPEG q75)"},
    "cifar10": {"CIFAR-10", "CIFAR-10 (exact subset: first 4,000 train and 1,000 test images)"},
    "imdb": {"IMDB"},
    "ag_news": {"AG News", "AG News (20,971 of 120,000 training texts)"},
    "wikitext2": {"WikiText-2", "WikiText-2 (its validation file as training set)"},
    "shakespeare": {"Tiny Shakespeare"},
}
"""Of all of it, and of the part that is passed around."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_real_files_are_called_what_they_are(name: str) -> None:
    """Where EDGEFL_DATA has them."""
    table = {"name": name, "test_samples": 0, "tokens": "bytes"}
    try:
        found = open_data(parse({"data": table}, source="the test"))
    except DataError as error:
        if "was not found" not in error.message:
            raise
        pytest.skip(error.message)
    assert found.name in NAMES[name]


def test_what_speakers_say_last_is_for_testing(tmp_path: Path) -> None:
    corpus = corpora.load("shakespeare", [written(tmp_path)])
    assert [text.split()[2] for text in corpus.test.texts if text.startswith("Hear")] == ["11"]
    assert corpus.train.texts[0] == "Hear me 0 again and again\n"


def test_news_are_numbered_from_0_and_keep_title_and_text(tmp_path: Path) -> None:
    train = corpora.load("ag_news", [written(tmp_path)]).train
    assert train.labels is not None and train.labels.tolist() == [2, 0]
    assert train.texts[0] == 'Fears for pension Unions say they are "disappointed".'


def test_files_that_are_nowhere_or_damaged_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"IMDB was not found: train.parquet or .* is not in .*; put it there, name the folder",
    ):
        corpora.load("imdb", [tmp_path])
    with pytest.raises(
        DataError, match=r"wiki\.train\.tokens or .*data\.download = true.* of wikitext-2-v1\.zip from"
    ):
        corpora.load("wikitext2", [tmp_path])
    (written(tmp_path) / "imdb" / "test.parquet").write_bytes(b"gone")
    with pytest.raises(DataError, match=r"the files of imdb cannot be read: .*; fetch them again"):
        corpora.load("imdb", [tmp_path])


def test_words_are_numbered_by_frequency() -> None:
    known = vocabulary.words(["A fine film. Fine, fine!", "a film"], 6)
    encode = known.encoder()

    assert encode(["fine film", "FINE", "strange a"]) == [[2, 4], [2], [1, 3]]  # 0 is padding, 1 unknown
    again = vocabulary.Vocabulary(6, known.tokenizer).encoder()
    assert again(["fine film"]) == encode(["fine film"])
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        vocabulary.Vocabulary(6, b"{}").encoder()


def test_bytes_need_no_library_and_lose_nothing() -> None:
    (numbers,) = vocabulary.Vocabulary().encoder()(["Grüße"])
    assert bytes(numbers).decode() == "Grüße"


def _letters(texts: list[str]) -> list[list[int]]:
    return [[1 + ord(letter) - ord("a") for letter in text] for text in texts]


def test_short_texts_are_padded_and_long_ones_cut() -> None:
    texts = Texts(["abc", "abcdefgh", ""], np.array([0, 1, 0]))
    data = samples.text_samples(
        Corpus("letters", texts, texts, ("no", "yes")), _letters, length=4, vocabulary=27, mask=True
    )

    assert data.train_x.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4], [0, 0, 0, 0]]
    assert data.others["attention_mask"].train.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert (data.below, data.classes, data.names, data.dtype) == (27, 2, ("no", "yes"), "int64")
    assert data.test_batch(np.array([1])).keys() == {"x", "attention_mask", "y"}


def test_windows_of_running_text_stay_with_their_owner() -> None:
    texts = Texts(["abc", "xyz", "def", "x"], owners=np.array([5, 7, 5, 7]))
    data = samples.window_samples(Corpus("letters", texts, texts), _letters, length=2, vocabulary=27)

    assert data.train_x.tolist() == [[1, 2], [3, 4], [24, 25]]
    assert data.train_y.tolist() == [[2, 3], [4, 5], [25, 26]]
    assert data.owners is not None and data.owners.tolist() == [5, 5, 7]
    with refuses(DataError, length=7):
        samples.window_samples(Corpus("letters", texts, texts), _letters, length=7, vocabulary=27)
    with refuses(ConfigError, data="letters"):
        samples.text_samples(Corpus("letters", texts, texts), _letters, length=7, vocabulary=27)


def test_a_unigram_model_knows_how_frequent_tokens_are_and_nothing_else() -> None:
    train, test = np.array([[0, 0, 0], [1, 0, 0]]), np.array([[0, 1], [2, 0]])
    said = np.array([6, 2, 1]) / 9  # counts 5, 1, 0 of 6 tokens, and one more of each of 3

    expected = np.exp(-np.log(said[[0, 1, 2, 0]]).mean())
    assert unigram_perplexity(train, test, 3) == pytest.approx(expected)
    assert unigram_perplexity(train[:0], test, 3) == pytest.approx(3.0)


def test_language_models_are_told_what_they_have_to_beat(tmp_path: Path) -> None:
    play = {"name": "shakespeare", "dir": str(written(tmp_path)), "length": 8}
    texts = open_data(parse({"data": play}, source="the test"))
    classes = open_data(parse({"data": {**play, "name": "ag_news", "vocabulary": 16}}, source="the test"))

    beaten = unigram_perplexity(texts.train_y, texts.test_y, 256)
    assert perplexity_to_beat(texts) == pytest.approx(beaten)
    assert (
        perplexity_to_beat(replace(texts, train_x=texts.train_x[:0], train_y=texts.train_y[:0], owners=None))
        is None
    )
    own = replace(
        texts, train_y=texts.train_x, test_y=texts.test_x
    )  # the tokens themselves: the first is never said
    assert perplexity_to_beat(own) == pytest.approx(
        unigram_perplexity(texts.train_x[:, 1:], texts.test_x[:, 1:], 256)
    )
    assert perplexity_to_beat(classes) is None


def test_owners_stay_whole_and_devices_about_equal() -> None:
    owners = np.repeat(np.arange(20), np.arange(1, 21))
    parts = by_owners(owners, 4, owners=owners, seed=3)

    assert sorted(np.concatenate(parts).tolist()) == list(range(len(owners)))
    assert sum(len(np.unique(owners[part])) for part in parts) == 20
    assert max(map(len, parts)) - min(map(len, parts)) <= 4
    assert [part.tolist() for part in parts] == [
        part.tolist() for part in by_owners(owners, 4, owners=owners, seed=3)
    ]
    with refuses(DataError, clients=21):
        by_owners(owners, 21, owners=owners, seed=3)


@pytest.mark.parametrize(
    ("data", "model", "shape", "spread"),
    [
        ({"name": "imdb", "length": 8, "vocabulary": 16, "partition": "iid"}, "bilstm", (8,), [1, 1, 1, 1]),
        ({"name": "ag_news", "length": 8, "vocabulary": 16}, "bert", (8,), None),
        ({"name": "shakespeare", "length": 8}, "lstm_lm", (8,), [33, 35]),
        ({"name": "wikitext2", "length": 2, "vocabulary": 12}, "lstm_lm", (2,), [2, 7]),
    ],
)
def test_a_model_takes_its_length_and_vocabulary_from_the_texts(
    tmp_path: Path, data: dict[str, object], model: str, shape: tuple[int, ...], spread: list[int] | None
) -> None:
    own = {"dir": str(written(tmp_path)), **data}
    federation = parse({"data": own, "model": {"name": model}}, source="the test")
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)

    assert spec.sample.shape == shape == dataset.shape
    assert spec.sample.below == dataset.below == int(str(data.get("vocabulary", 256)))
    if spread is not None:
        assert sorted(map(len, partition(federation, dataset, len(spread)))) == spread


def test_texts_are_split_for_validation_before_the_limit_of_training_texts(tmp_path: Path) -> None:
    table = {"name": "imdb", "dir": str(written(tmp_path)), "length": 8, "vocabulary": 16}

    def opened(seed: int, **more: object) -> Dataset:
        return open_data(parse({"data": {**table, **more}, "federation": {"seed": seed}}, source="the test"))

    whole = opened(0)
    for seed in range(3):
        split = opened(seed, validation=0.5, train_samples=1)
        assert (len(split.train_x), len(split.test_x)) == (1, 2)
        assert np.array_equal(split.test_x, opened(0, validation=0.5).test_x)
        assert not (split.test_x[:, None] == split.train_x).all(axis=2).any()
        assert (split.test_x[:, None] == whole.train_x).all(axis=2).any(axis=1).all()


def test_a_partition_by_class_is_refused_where_samples_have_none(tmp_path: Path) -> None:
    table = {"name": "shakespeare", "dir": str(written(tmp_path)), "length": 8, "partition": "dirichlet"}
    federation = parse({"data": table, "model": {"name": "lstm_lm"}}, source="the test")
    with refuses(ConfigError, data="Tiny Shakespeare", partition="dirichlet"):
        partition(federation, open_data(federation), 2)


def test_a_damaged_vocabulary_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def words(texts: Sequence[str], size: int) -> Vocabulary:
        made.append(size)
        return vocabulary.words(texts, size)

    texts = ["a fine film", "a film"]
    first = vocabulary.cached_vocabulary(words, texts, 4)
    assert vocabulary.cached_vocabulary(words, texts, 4) == first == vocabulary.words(texts, 4) and made == [
        4
    ]
    vocabulary.cached_vocabulary(words, texts, 5)
    vocabulary.cached_vocabulary(words, [*texts, ""], 4)
    assert made == [4, 5, 4]

    for file in tmp_path.rglob("*.json"):
        file.write_bytes(b"{}")
    assert vocabulary.cached_vocabulary(words, texts, 4) == first and made == [4, 5, 4, 4]
