"""A class for every token of a sequence, and the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.loss import (
    cannot_read,
    check_smoothing,
    counting,
    named,
    negative_log_likelihood,
    per_sample,
)

_READS = "(tokens, vocabulary) logits"


@dataclass(frozen=True)
class SequenceCrossEntropy:
    """One class for each token of a sequence.

    The cross-entropy of every position: logits (B, T, V), y (B, T) int64, mean over tokens. Tokens labelled
    ``ignore_index`` (-100, or the number of a padding token) count neither as loss nor as right or wrong, and a
    batch's mean is over the others, as torch's. ``label_smoothing`` as in
    :class:`~edgefl.models.losses.classes.CrossEntropy`.
    """

    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        values = negative_log_likelihood(out, named(y, self.ignore_index), self.label_smoothing)
        return per_sample(values, counting(y, self.ignore_index))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        hits = (out.argmax(dim=-1) == y).to(torch.float32)
        return per_sample(hits, counting(y, self.ignore_index))

    def weight(self, y: Tensor) -> Tensor | None:
        counted = counting(y, self.ignore_index)
        return None if counted is None else counted.sum(dim=1)

    def logits(self, out: Tensor) -> Tensor:
        return out

    def output(self, logits: Tensor) -> Tensor:
        return logits

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2:
            raise cannot_read(self, out, _READS)
        return TensorSpec(out.shape[:1], torch.int64, out.shape[1], self.ignore_index)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("accuracy", "perplexity")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """``nll`` is without smoothing: perplexity is that of what the model says."""
        counted = counting(y, self.ignore_index)
        if counted is None:
            counted = torch.ones_like(y, dtype=torch.float32)
        values = negative_log_likelihood(out, named(y, self.ignore_index), 0.0)
        return {"nll": (values * counted).sum(dim=1), "tokens": counted.sum(dim=1)}


@dataclass(frozen=True)
class CausalLM:
    """Language modelling: the next token of a sequence.

    Logits (B, T, V) at a token say the next one, and labels y (B, T) int64 are the tokens themselves: the loss compares
    ``out[:, :-1]`` with ``y[:, 1:]``, mean over tokens. Without ``shift`` labels are the tokens that follow already.

    Labels ``ignore_index`` count for nothing: padding, or a prompt that is not to be learned. A padding token has its own
    number in ``x``; its label is -100 then, or ``ignore_index`` is its number. ``label_smoothing`` as in
    :class:`~edgefl.models.losses.classes.CrossEntropy`.
    """

    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    shift: bool = True

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return self._tokens.each(*self._pair(out, y))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return self._tokens.correct(*self._pair(out, y))

    def weight(self, y: Tensor) -> Tensor | None:
        return self._tokens.weight(y[:, 1:] if self.shift else y)

    def logits(self, out: Tensor) -> Tensor:
        return out

    def output(self, logits: Tensor) -> Tensor:
        return logits

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2 or out.shape[0] < 2:
            raise cannot_read(self, out, f"{_READS} of two tokens at least")
        return self._tokens.label(out)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("perplexity", "accuracy")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return self._tokens.sums(*self._pair(out, y))

    def _pair(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the tokens that they are to say."""
        return (out[:, :-1], y[:, 1:]) if self.shift else (out, y)

    @property
    def _tokens(self) -> SequenceCrossEntropy:
        return SequenceCrossEntropy(self.ignore_index, self.label_smoothing)
