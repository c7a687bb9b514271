"""Unigram baseline of language models: each token as likely as it was frequent, whatever precedes it."""

from __future__ import annotations

import math

import numpy as np

from edgefl.data.dataset import Array


def unigram_perplexity(train: Array, test: Array, vocabulary: int) -> float:
    """Return the perplexity of a unigram model with add-one smoothing, so that no token is impossible.

    It gives token v the probability (count of v in ``train`` + 1) / (tokens of ``train`` + ``vocabulary``). Both arrays are
    integers 0 .. ``vocabulary`` - 1 of any shape; ``test`` has at least one.
    """
    counts = np.bincount(train.reshape(-1), minlength=vocabulary) + 1
    surprise = np.log(counts.sum()) - np.log(counts)
    return math.exp(float(surprise[test].mean()))
