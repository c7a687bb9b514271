"""LSTM language model of FAFED (fafed.md 4.1), which predicts the next token at every position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.initial import initialize
from edgefl.models.layers.recurrent import Lstm
from edgefl.models.losses import CausalLM
from edgefl.models.spec import ModelSpec, sequential

BOUND = 0.1
"""Embedding and decoder start uniform in +-0.1 (fafed.md 4.1)."""


class WordEmbedding(nn.Embedding):
    """Token numbers (B, T) int64 -> vectors (B, T, E)."""

    def fill(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-BOUND, BOUND, generator=generator)


class Decoder(nn.Linear):
    """Hidden states (B, T, H) -> logits over the vocabulary (B, T, V)."""

    def fill(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-BOUND, BOUND, generator=generator)
        self.bias.zero_()


class Recurrent(nn.Module):
    """Dropout, LSTM layers with dropout between them, dropout: (B, T, E) -> (B, T, H)."""

    def __init__(self, features: int, hidden: int, layers: int, rate: float) -> None:
        super().__init__()
        self.drop_in = nn.Dropout(rate)
        self.lstm = Lstm(features, hidden, layers=layers, dropout=rate)
        self.drop_out = nn.Dropout(rate)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.drop_out(self.lstm(self.drop_in(words)))
        return out


def lstm_lm(
    *,
    length: int = 35,
    vocabulary: int = 5000,
    features: int = 200,
    hidden: int = 200,
    layers: int = 2,
    rate: float = 0.5,
    seed: int = 0,
) -> ModelSpec:
    """Return embedding, LSTM and decoder. A sample is ``length`` tokens, its label the ``length`` tokens that follow each.

    The paper's size is ``vocabulary=33_278, features=650, hidden=650`` (50,065,078 parameters, fafed.md 2.3). Embedding
    and decoder are not tied: a tensor with two names would be trained apart, and its copies would drift. Every
    sample begins with a zero state, independent of the batch before.
    """

    def units() -> nn.Sequential:
        return sequential(
            [
                ("embedding", WordEmbedding(vocabulary, features)),
                ("lstm", Recurrent(features, hidden, layers, rate)),
                ("decoder", Decoder(hidden, vocabulary)),
            ]
        )

    sample = TensorSpec((length,), torch.int64, vocabulary)
    loss = CausalLM(ignore_index=None, shift=False)
    return ModelSpec("lstm_lm", initialize(units, seed), sample, vocabulary, loss=loss)
