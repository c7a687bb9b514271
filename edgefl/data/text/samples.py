"""Samples made of texts: one per text with its class, or windows of running text with the next tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from edgefl.data.dataset import Array, Dataset, OtherInput
from edgefl.data.text.corpora import Corpus, Texts
from edgefl.errors import ConfigError, DataError

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Function that returns the token numbers of each text."""

MASK = "attention_mask"
"""Name of the additional input that is 1 at tokens and 0 at padding."""


def text_samples(
    corpus: Corpus, encode: Encode, *, length: int, vocabulary: int, mask: bool = False
) -> Dataset:
    """Return one sample per text: its first ``length`` tokens, padded with token 0, int64 (n, length), and its class.

    Args:
        corpus: Texts with classes.
        encode: Function that returns the token numbers of each text.
        length: Tokens of a sample.
        vocabulary: Number of tokens.
        mask: True: add the input ``attention_mask``, int64 (n, length), 1 at tokens and 0 at padding.

    Raises:
        ConfigError: The texts have no classes.
    """
    if not corpus.classes:
        raise ConfigError(
            f"{corpus.name} has no classes: train a model that says what comes next on it", data=corpus.name
        )
    (train_x, train_mask), (test_x, test_mask) = (
        _pad(encode(part.texts), length) for part in (corpus.train, corpus.test)
    )
    assert corpus.train.labels is not None and corpus.test.labels is not None
    return Dataset(
        name=corpus.name,
        train_x=train_x,
        train_y=corpus.train.labels,
        test_x=test_x,
        test_y=corpus.test.labels,
        scale=1.0,
        shift=0.0,
        classes=len(corpus.classes),
        below=vocabulary,
        others={MASK: OtherInput(train_mask, test_mask, 2)} if mask else {},
        names=corpus.classes,
        owners=corpus.train.owners,
        test_owners=corpus.test.owners,
    )


def window_samples(corpus: Corpus, encode: Encode, *, length: int, vocabulary: int) -> Dataset:
    """Return windows of ``length`` tokens, int64 (n, length), for a language model. Labels are the next token of each.

    Windows follow each other in the joined texts of one owner. A shorter rest is left out.

    Args:
        corpus: Texts.
        encode: Function that returns the token numbers of each text.
        length: Tokens of a window.
        vocabulary: Number of tokens.

    Raises:
        DataError: No owner has ``length + 1`` tokens.
    """
    train_x, train_y, owners = _windows(corpus.train, encode, length)
    test_x, test_y, test_owners = _windows(corpus.test, encode, length)
    for part, x in (("training", train_x), ("test", test_x)):
        if not len(x):
            raise DataError(
                f"{corpus.name}: no {part} text has {length + 1} tokens; choose a smaller length",
                length=length,
            )
    return Dataset(
        name=corpus.name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        scale=1.0,
        shift=0.0,
        classes=vocabulary,
        below=vocabulary,
        owners=owners,
        test_owners=test_owners,
    )


def _pad(rows: Sequence[Sequence[int]], length: int) -> tuple[Array, Array]:
    """Return (tokens, mask), both int64 (n, length). Rows of tokens are cut or padded with 0; the mask is 1 at tokens."""
    tokens, mask = np.zeros((2, len(rows), length), np.int64)
    for place, row in enumerate(rows):
        kept = row[:length]
        tokens[place, : len(kept)], mask[place, : len(kept)] = kept, 1
    return tokens, mask


def _windows(part: Texts, encode: Encode, length: int) -> tuple[Array, Array, Array]:
    """Return (tokens, next tokens, owners) of all windows: int64 (n, length), (n, length) and (n,)."""
    owners = np.zeros(len(part), np.int64) if part.owners is None else part.owners
    said: dict[int, list[int]] = {}
    for who, tokens in zip(owners.tolist(), encode(part.texts), strict=True):
        said.setdefault(who, []).extend(tokens)
    x, y, whose = [np.zeros((0, length), np.int64)], [np.zeros((0, length), np.int64)], []
    for who, tokens in said.items():
        count = (len(tokens) - 1) // length
        stream = np.array(tokens[: count * length + 1], np.int64)
        if count:
            x.append(stream[:-1].reshape(count, length))
            y.append(stream[1:].reshape(count, length))
            whose += [who] * count
    return np.concatenate(x), np.concatenate(y), np.array(whose, np.int64)


def unigram_perplexity(train: Array, test: Array, vocabulary: int) -> float:
    """Return the perplexity of a unigram model with add-one smoothing, so that no token has probability 0.

    The model gives token v the probability (count of v in ``train`` + 1) / (tokens of ``train`` + ``vocabulary``).

    Args:
        train: Token numbers 0 .. ``vocabulary`` - 1, of any shape.
        test: Token numbers to predict, at least one.
        vocabulary: Number of tokens.
    """
    counts = np.bincount(train.reshape(-1), minlength=vocabulary) + 1
    surprise = np.log(counts.sum()) - np.log(counts)
    return math.exp(float(surprise[test].mean()))
