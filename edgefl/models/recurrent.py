"""The bidirectional LSTM of spec 3.3 (one bias vector per gate), whole or split in two parts along the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.models.layers import Dropout

State = tuple[Tensor, Tensor]


class LstmDirection(nn.Module):
    """One direction: gates in the order input, forget, cell, output; ``recurrent`` is (4H, H), ``kernel`` (4H, E)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.kernel = nn.Parameter(torch.empty(4 * hidden, features))
        self.recurrent = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))

    def forward(self, words: Tensor, state: State) -> State:
        """``words`` (B, T, E) in processing order, ``state`` = (h, c), each (B, H); the state after T steps."""
        h, c = state
        for projected in (words @ self.kernel.t() + self.bias).unbind(1):
            i, f, g, o = (projected + h @ self.recurrent.t()).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c

    def zero_state(self, words: Tensor) -> State:
        zeros = words.new_zeros(words.shape[0], self.hidden)
        return zeros, zeros


class BiLstm(nn.Module):
    """Words (B, T, E) -> the two directions' last hidden states (B, 2H), dropout before and after.

    ``skip`` is the number of first words, in each direction's own processing order, whose states another part has
    computed (0: none). Then the input is packed by :func:`pack`, (B, T*E + 4H), and only T - skip steps are run:
    the paper's weak tier, truncated back-propagation (spec 3.3).
    """

    def __init__(self, features: int, hidden: int, length: int, *, rate: float = 0.3, skip: int = 0) -> None:
        super().__init__()
        self.features, self.hidden, self.length, self.skip = features, hidden, length, skip
        self.forward_cell = LstmDirection(features, hidden)
        self.reverse_cell = LstmDirection(features, hidden)
        self.drop_in = Dropout(rate)
        self.drop_out = Dropout(rate)

    @property
    def directions(self) -> tuple[LstmDirection, LstmDirection]:
        return self.forward_cell, self.reverse_cell

    @property
    def steps(self) -> int:
        """Time steps each direction runs, hence differentiates through."""
        return self.length - self.skip

    def forward(self, x: Tensor) -> Tensor:
        words, states = self._unpack(x)
        words = self.drop_in(words)
        orders = (words[:, self.skip :], words[:, : self.steps].flip(1))
        last = [
            cell(order, state)[0] for cell, order, state in zip(self.directions, orders, states, strict=True)
        ]
        out: Tensor = self.drop_out(torch.cat(last, dim=1))
        return out

    def _unpack(self, x: Tensor) -> tuple[Tensor, tuple[State, State]]:
        if self.skip == 0:
            return x, (self.forward_cell.zero_state(x), self.reverse_cell.zero_state(x))
        words, *h_and_c = torch.split(x, [self.length * self.features, *[self.hidden] * 4], dim=1)
        forward, reverse = (h_and_c[0], h_and_c[1]), (h_and_c[2], h_and_c[3])
        return words.reshape(-1, self.length, self.features), (forward, reverse)


class BiLstmStart(nn.Module):
    """The frozen first ``steps`` words of each direction: (B, T, E) -> :func:`pack`, the record of the weak tier.

    Its tensors have the names of :class:`BiLstm`, so the same global weights feed both parts.
    """

    def __init__(self, features: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.forward_cell = LstmDirection(features, hidden)
        self.reverse_cell = LstmDirection(features, hidden)

    def forward(self, words: Tensor) -> Tensor:
        first, last = words[:, : self.steps], words.flip(1)[:, : self.steps]
        forward = self.forward_cell(first, self.forward_cell.zero_state(words))
        reverse = self.reverse_cell(last, self.reverse_cell.zero_state(words))
        return pack(words, forward, reverse)


def pack(words: Tensor, forward: State, reverse: State) -> Tensor:
    """One tensor per boundary: all embeddings (T*E), then h, c of the forward and h, c of the reverse direction."""
    return torch.cat((words.flatten(1), *forward, *reverse), dim=1)


def truncated(whole: BiLstm, skip: int) -> tuple[BiLstmStart, BiLstm]:
    """``whole`` in two parts that share its tensors: the frozen first ``skip`` words, and the trained rest."""
    start = BiLstmStart(whole.features, whole.hidden, skip)
    rest = BiLstm(whole.features, whole.hidden, whole.length, rate=whole.drop_in.rate, skip=skip)
    for part in (start, rest):
        part.forward_cell, part.reverse_cell = whole.forward_cell, whole.reverse_cell
    return start, rest
