"""The least that a language model has to beat: each token as likely as it was frequent, whatever stands before it."""

from __future__ import annotations

import math

import numpy as np

from edgefl.data.dataset import Array


def unigram_perplexity(train: Array, test: Array, vocabulary: int) -> float:
    """Perplexity on the tokens ``test`` of a model that gives token v the probability (count of v in ``train`` + 1) /
    (tokens of ``train`` + ``vocabulary``): add-one smoothing, so that no token is impossible.

    Both are whole numbers 0 .. ``vocabulary`` - 1 of any shape; ``test`` has one at least.
    """
    counts = np.bincount(train.reshape(-1), minlength=vocabulary) + 1
    surprise = np.log(counts.sum()) - np.log(counts)
    return math.exp(float(surprise[test].mean()))
