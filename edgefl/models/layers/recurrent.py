"""Recurrent layers: stacked LSTM and GRU with torch's names and layouts, and the bidirectional LSTM of embracingfl.md 3.3.

The steps themselves are operators (:mod:`edgefl.models.layers.cells`), so neither tracing nor a graph grows with the
sequence. Inside, a sequence is (T, B, features), as in those operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.layers import cells

State = tuple[Tensor, Tensor]
States = tuple[Tensor, ...]

# Added to a gate's input, it opens or closes the gate: the sigmoid is exactly 1 or 0 in float32.
_SHUT = 1e4


class CellKind(ABC):
    """Kind of recurrent layer: LSTM or GRU.

    Attributes:
        gates: number of gates.
        state_tensors: number of tensors of the state.
        hold: number to add to the input of each gate behind the end of a sequence, so that the state (an LSTM's c, a
            GRU's h) stays as it is.
    """

    gates: ClassVar[int]
    state_tensors: ClassVar[int]
    hold: ClassVar[tuple[float, ...]]

    @abstractmethod
    def run(self, x: Tensor, weights: Sequence[Tensor], first: States, reverse: bool) -> States:
        """Run one layer in one direction.

        Args:
            x: sequence (T, B, E).
            weights: kernel and recurrent kernel, and two biases or none.
            first: tensors of the first state, (B, H).
            reverse: run from the last position to the first.

        Returns:
            The hidden states (T, B, H) and the tensors of the last state.
        """


class _LstmKind(CellKind):
    gates, state_tensors, hold = 4, 2, (-_SHUT, _SHUT, 0.0, 0.0)

    def run(self, x: Tensor, weights: Sequence[Tensor], first: States, reverse: bool) -> States:
        kernel, recurrent, *biases = weights
        bias = biases[0] + biases[1] if biases else recurrent.new_zeros(recurrent.shape[0])
        return cells.lstm(x, kernel, recurrent, bias, first[0], first[1], reverse=reverse)


class _GruKind(CellKind):
    gates, state_tensors, hold = 3, 1, (0.0, _SHUT, 0.0)

    def run(self, x: Tensor, weights: Sequence[Tensor], first: States, reverse: bool) -> States:
        kernel, recurrent, *biases = weights
        outer, inner = biases or [recurrent.new_zeros(recurrent.shape[0])] * 2
        return cells.gru(x, kernel, recurrent, outer, inner, first[0], reverse=reverse)


LSTM, GRU = _LstmKind(), _GruKind()


def run_layers(
    sequence: Tensor,
    state: States,
    layers: int,
    ends: Sequence[str],
    drop: Callable[[int, Tensor], Tensor],
    run: Callable[[Tensor, int, str, States], States],
) -> tuple[Tensor, States]:
    """Run ``layers`` on each other over ``sequence`` (T, B, E), each in the directions ``ends``.

    ``state`` has tensors (layers*D, B, H). ``drop`` is called between layers with the number of the layer below, ``run``
    for each layer and direction. Returns the last layer's hidden states (T, B, D*H) and the state at the end.
    """
    first = zip(*(part.unbind() for part in state), strict=True)
    last = []
    for layer in range(layers):
        sequence = sequence if layer == 0 else drop(layer - 1, sequence)
        results = [run(sequence, layer, end, next(first)) for end in ends]
        last += [result[1:] for result in results]
        states = [result[0] for result in results]
        sequence = states[0] if len(states) == 1 else torch.cat(states, dim=2)
    return sequence, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


class Stack(nn.Module):
    """Layers of one kind on each other, in one direction or two, with dropout between them.

    Parameters have the names and layouts of ``torch.nn.LSTM`` and ``torch.nn.GRU`` (``weight_ih_l0`` (G*H, E),
    ``weight_hh_l0`` (G*H, H), ``bias_ih_l0``, ``bias_hh_l0`` (G*H), ``..._reverse``), so their state dicts load.
    The noise of the dropout layers is (T, B, D*H).
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor

    def __init__(
        self,
        kind: CellKind,
        features: int,
        hidden: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ModelError(
                f"a recurrent stack has at least one layer, found layers={layers}", layers=layers
            )
        self.kind, self.layers = kind, layers
        self.ends = ("", "_reverse") if bidirectional else ("",)
        self.tensors = (
            ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if bias else ("weight_ih", "weight_hh")
        )
        self.drops = nn.ModuleList(nn.Dropout(dropout) for _ in range(layers - 1))
        for layer in range(layers):
            read = features if layer == 0 else hidden * len(self.ends)
            widths = {"weight_ih": (read,), "weight_hh": (hidden,)}
            for name in self._names(layer):
                values = torch.empty(kind.gates * hidden, *widths.get(name.partition("_l")[0], ()))
                self.register_parameter(name, nn.Parameter(values))

    @property
    def features(self) -> int:
        """Number of input features of the first layer."""
        return self.weight_ih_l0.shape[1]

    @property
    def hidden(self) -> int:
        """Size of the hidden states."""
        return self.weight_hh_l0.shape[1]

    def _names(self, layer: int) -> list[str]:
        return [f"{tensor}_l{layer}{end}" for end in self.ends for tensor in self.tensors]

    @torch.no_grad()
    def fill(self, generator: torch.Generator | None = None) -> None:
        """Set initial values as torch does: uniform in +-1/sqrt(H)."""
        for parameter in self.parameters():
            parameter.uniform_(-(self.hidden**-0.5), self.hidden**-0.5, generator=generator)

    def run(self, x: Tensor, state: States | None = None) -> tuple[Tensor, States]:
        """Return the last layer's hidden states at every position (B, T, D*H) for ``x`` (B, T, E), and the final state.

        A state is (h, c) for an LSTM and (h,) for a GRU, each (layers*D, B, H); None means zeros.
        """
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.features:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ModelError(
                f"a recurrent layer of {self.features} features reads a padded batch (B, T, {self.features}), found "
                f"{shape}; pad packed sequences, give one sequence a batch dimension, or change the features",
                found=shape,
            )
        sequence = x.transpose(0, 1)
        if state is None:
            zeros = sequence.new_zeros(self.layers * len(self.ends), sequence.shape[1], self.hidden)
            state = (zeros,) * self.kind.state_tensors
        sequence, final = run_layers(
            sequence, state, self.layers, self.ends, lambda at, below: self.drops[at](below), self._direction
        )
        # Contiguous, because torch gives a dense layer that reads a view two ops instead of one.
        return sequence.transpose(0, 1).contiguous(), final

    def _direction(self, sequence: Tensor, layer: int, end: str, first: States) -> States:
        return self.kind.run(sequence, self._weights(layer, end), first, end == "_reverse")

    def _weights(self, layer: int, end: str) -> list[Tensor]:
        return [getattr(self, f"{tensor}_l{layer}{end}") for tensor in self.tensors]

    def extra_repr(self) -> str:
        return f"{self.features}, {self.hidden}, layers={self.layers}, directions={len(self.ends)}"


class _Sequences(Stack):
    """Stacked layers of the class's own kind, with initial values, for their hidden states only."""

    own: ClassVar[CellKind]

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            self.own, features, hidden, layers=layers, bidirectional=bidirectional, dropout=dropout
        )
        self.fill()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0]


class Lstm(_Sequences):
    """Stacked LSTM layers: (B, T, E) -> the hidden states at every position, (B, T, D*H)."""

    own = LSTM


class Gru(_Sequences):
    """Stacked GRU layers: (B, T, E) -> the hidden states at every position, (B, T, D*H)."""

    own = GRU


class LstmDirection(nn.Module):
    """One direction of an LSTM; gates are input, forget, cell, output, ``recurrent`` is (4H, H), ``kernel`` (4H, E)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(4 * hidden, features))
        self.recurrent = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))

    @property
    def features(self) -> int:
        return self.kernel.shape[1]

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[1]

    def forward(self, words: Tensor, state: State, *, reverse: bool = False) -> State:
        """Return the state (h, c), each (B, H), after T steps over ``words`` (B, T, E), from the end if ``reverse``."""
        x = words.transpose(0, 1)
        _, h, c = cells.lstm(x, self.kernel, self.recurrent, self.bias, *state, reverse=reverse)
        return h, c

    def zero_state(self, words: Tensor) -> State:
        zeros = words.new_zeros(words.shape[0], self.hidden)
        return zeros, zeros


class BiLstm(nn.Module):
    """Bidirectional LSTM from words (B, T, E) to the last hidden states of both directions (B, 2H), with dropout.

    ``skip`` is the number of first words, in each direction's own order, whose states another part has computed. If it is
    not 0, the input is packed by :func:`pack`, (B, T*E + 4H), and only T - skip steps run: the paper's weak tier,
    truncated back-propagation (embracingfl.md 3.3).
    """

    def __init__(self, features: int, hidden: int, length: int, *, rate: float = 0.3, skip: int = 0) -> None:
        super().__init__()
        self.length, self.skip = length, skip
        self.forward_cell = LstmDirection(features, hidden)
        self.reverse_cell = LstmDirection(features, hidden)
        self.drop_in = nn.Dropout(rate)
        self.drop_out = nn.Dropout(rate)

    @property
    def features(self) -> int:
        return self.forward_cell.features

    @property
    def hidden(self) -> int:
        return self.forward_cell.hidden

    @property
    def directions(self) -> tuple[LstmDirection, LstmDirection]:
        return self.forward_cell, self.reverse_cell

    @property
    def steps(self) -> int:
        """Time steps that each direction runs and differentiates."""
        return self.length - self.skip

    def forward(self, x: Tensor) -> Tensor:
        words, states = self._unpack(x)
        words = self.drop_in(words)
        forward, _ = self.forward_cell(words[:, self.skip :], states[0])
        reverse, _ = self.reverse_cell(words[:, : self.steps], states[1], reverse=True)
        out: Tensor = self.drop_out(torch.cat((forward, reverse), dim=1))
        return out

    def _unpack(self, x: Tensor) -> tuple[Tensor, tuple[State, State]]:
        if self.skip == 0:
            return x, (self.forward_cell.zero_state(x), self.reverse_cell.zero_state(x))
        words, *h_and_c = torch.split(x, [self.length * self.features, *[self.hidden] * 4], dim=1)
        forward, reverse = (h_and_c[0], h_and_c[1]), (h_and_c[2], h_and_c[3])
        return words.reshape(-1, self.length, self.features), (forward, reverse)


class BiLstmStart(nn.Module):
    """Frozen first ``steps`` words of each direction: (B, T, E) -> :func:`pack`, the record of the weak tier.

    Its tensors have the names of :class:`BiLstm`, so the same global weights feed both parts.
    """

    def __init__(self, features: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.forward_cell = LstmDirection(features, hidden)
        self.reverse_cell = LstmDirection(features, hidden)

    def forward(self, words: Tensor) -> Tensor:
        first, last = words[:, : self.steps], words[:, words.shape[1] - self.steps :]
        forward = self.forward_cell(first, self.forward_cell.zero_state(words))
        reverse = self.reverse_cell(last, self.reverse_cell.zero_state(words), reverse=True)
        return pack(words, forward, reverse)


def pack(words: Tensor, forward: State, reverse: State) -> Tensor:
    """Return one tensor: all embeddings (T*E), then h, c of the forward and h, c of the reverse direction."""
    return torch.cat((words.flatten(1), *forward, *reverse), dim=1)


def truncate(whole: BiLstm, skip: int) -> tuple[BiLstmStart, BiLstm]:
    """Return ``whole`` as two parts that share its tensors: the frozen first ``skip`` words, and the trained rest."""
    start = BiLstmStart(whole.features, whole.hidden, skip)
    rest = BiLstm(whole.features, whole.hidden, whole.length, rate=whole.drop_in.p, skip=skip)
    for part in (start, rest):
        part.forward_cell, part.reverse_cell = whole.forward_cell, whole.reverse_cell
    return start, rest
