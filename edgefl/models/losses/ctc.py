"""Connectionist temporal classification: loss of a text whose position in a longer sequence is unknown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import output_error

_NEVER = -1e30
"""Logarithm of probability 0. It is finite, so that differences are not NaN."""


@dataclass(frozen=True)
class CTC:
    """Connectionist temporal classification, for a text of unknown position in a longer sequence, such as a recording.

    -log of the text's probability over all its positions (Graves et al. 2006, equations 6 to 8), divided by its length,
    as torch's mean. ``out`` is (B, T, C), logits of C symbols at T times. ``y`` is (B, ``length``) int64: the symbols
    of the text, then ``blank``. The forward recursion is unrolled over T, with about 25 ops per time step in a training
    graph. A text that does not fit into T times has loss 0. A sample is correct if the most likely symbols, without
    repetitions and blanks, are its text.

    Args:
        length: Number of symbols of a label; at least 1.
        blank: Number of the blank symbol.

    Raises:
        ModelError: ``length`` or ``blank`` is out of range.
    """

    length: int
    blank: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.blank < 0:
            raise ModelError(
                f"the loss ctc reads texts of 1 symbol at least, and a blank from 0 on; found length {self.length}, blank "
                f"{self.blank}",
                length=self.length,
                blank=self.blank,
            )

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        states = self._states(y)
        emitted = torch.log_softmax(out, dim=-1).gather(2, states.unsqueeze(1).expand(-1, out.shape[1], -1))
        skips = self._skips(states)
        position = torch.arange(states.shape[1], device=y.device)
        alpha = torch.where(position < 2, emitted[:, 0], torch.full_like(emitted[:, 0], _NEVER))
        never = torch.full_like(alpha, _NEVER)
        for time in range(1, out.shape[1]):
            one = torch.cat((never[:, :1], alpha[:, :-1]), dim=1)
            two = torch.where(skips, torch.cat((never[:, :2], alpha[:, :-2]), dim=1), never)
            alpha = torch.logsumexp(torch.stack((alpha, one, two), dim=1), dim=1) + emitted[:, time]
        symbols = (y != self.blank).sum(dim=1, keepdim=True)
        ends = (position == 2 * symbols) | (position == 2 * symbols - 1)
        nll = -torch.logsumexp(torch.where(ends, alpha, never), dim=1)
        possible = nll < -0.5 * _NEVER
        length = symbols.squeeze(1).clamp_min(1).to(nll.dtype)
        return torch.where(possible, nll, torch.zeros_like(nll)) / length

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        path = out.argmax(dim=-1)
        before = torch.cat((torch.full_like(path[:, :1], self.blank), path[:, :-1]), dim=1)
        emitted = (path != self.blank) & (path != before)
        # Number of symbols up to each time, as a product with a matrix, because every engine has that.
        times = torch.ones(path.shape[1], path.shape[1], device=out.device).triu()
        count = (emitted.to(torch.float32) @ times).to(torch.int64)
        expected = y.gather(1, (count - 1).clamp(0, self.length - 1))
        wrong = (emitted & ((expected != path) | (count > self.length))).to(torch.float32).sum(dim=1)
        as_many = count[:, -1] == (y != self.blank).sum(dim=1)
        return ((wrong == 0) & as_many).to(torch.float32)

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2 or out.shape[1] <= self.blank:
            raise output_error(self, out, f"(times, symbols) logits, a blank {self.blank} among them,")
        return TensorSpec((self.length,), torch.int64, out.shape[1])

    def _states(self, y: Tensor) -> Tensor:
        """Return the symbols of the text ``y`` with a blank before, between and after them, (B, 2 length + 1)."""
        blanks = torch.full_like(y, self.blank)
        pairs = torch.stack((blanks, y), dim=2).reshape(len(y), -1)
        return torch.cat((pairs, blanks[:, :1]), dim=1)

    def _skips(self, states: Tensor) -> Tensor:
        """Return a bool mask (B, 2 length + 1) of the states that may directly follow the state two positions before.

        These are symbols that differ from the symbol before them.
        """
        before = torch.cat((states[:, :2], states[:, :-2]), dim=1)
        return (states != self.blank) & (states != before)
