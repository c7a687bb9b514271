"""Recurrent layers: stacked LSTM and GRU with torch's names and layouts, and the bidirectional LSTM of embracingfl.md 3.3.

The steps are operators (:mod:`edgefl.models.layers.cells`), so neither a trace nor a graph grows with the length of the
sequence. Inside, as in these operators, a sequence is (T, B, features).
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
    """Kind of a recurrent layer: LSTM or GRU.

    Attributes:
        gates: Number of gates.
        state_tensors: Number of tensors of a state: 2 (h, c) for an LSTM, 1 (h) for a GRU.
        hold: Number per gate. Added to the gates' inputs beyond the end of a sequence, they keep the state (an LSTM's
            c, a GRU's h) unchanged.
    """

    gates: ClassVar[int]
    state_tensors: ClassVar[int]
    hold: ClassVar[tuple[float, ...]]

    @abstractmethod
    def run(self, x: Tensor, weights: Sequence[Tensor], first: States, reverse: bool) -> States:
        """Run one layer in one direction.

        Args:
            x: Sequence (T, B, E).
            weights: Kernel and recurrent kernel, then two biases or none.
            first: Tensors of the initial state, each (B, H).
            reverse: Run from the last position to the first.

        Returns:
            Hidden states (T, B, H), then the tensors of the last state.
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
    """Run recurrent layers, each on the hidden states of the one below it.

    Args:
        sequence: Input (T, B, E).
        state: Tensors of the initial state, each (layers*D, B, H) for D directions.
        layers: Number of layers.
        ends: Suffix of the parameter names of each direction: ``""`` forward, ``"_reverse"`` backward.
        drop: Function (layer below, hidden states) that applies dropout between two layers.
        run: Function (sequence, layer, suffix, initial state) that runs one layer in one direction like
            :meth:`CellKind.run`.

    Returns:
        (hidden states of the last layer (T, B, D*H), tensors of the final state, each (layers*D, B, H)).
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
    """Recurrent layers on top of each other, in one direction or two, with dropout between them.

    Parameters have the names and layouts of ``torch.nn.LSTM`` and ``torch.nn.GRU`` (``weight_ih_l0`` (G*H, E),
    ``weight_hh_l0`` (G*H, H), ``bias_ih_l0``, ``bias_hh_l0`` (G*H), ``..._reverse``), so their state dicts can be
    loaded. The noise of the dropout layers is (T, B, D*H).

    Args:
        kind: :data:`LSTM` or :data:`GRU`.
        features: Input features E.
        hidden: Size H of the hidden states.
        layers: Number of layers.
        bidirectional: Run in both directions.
        dropout: Rate of the dropout between layers.
        bias: Add biases.

    Raises:
        ModelError: ``layers`` is below 1.
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
        """Return the names of the parameters of layer number ``layer``, of all its directions, such as
        ``weight_ih_l0_reverse``.
        """
        return [f"{tensor}_l{layer}{end}" for end in self.ends for tensor in self.tensors]

    @torch.no_grad()
    def fill(self, generator: torch.Generator | None = None) -> None:
        """Set the initial values of all parameters as torch does: uniform in +-1/sqrt(H).

        They are drawn from ``generator``, or from torch's global generator if it is None.
        """
        for parameter in self.parameters():
            parameter.uniform_(-(self.hidden**-0.5), self.hidden**-0.5, generator=generator)

    def run(self, x: Tensor, state: States | None = None) -> tuple[Tensor, States]:
        """Run the layers over a batch of sequences.

        Args:
            x: Sequences (B, T, E).
            state: Initial state: (h, c) for an LSTM and (h,) for a GRU, each (layers*D, B, H). None: zeros.

        Returns:
            (hidden states of the last layer at every position (B, T, D*H), final state like ``state``).

        Raises:
            ModelError: ``x`` is no padded batch with this number of features.
        """
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.features:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ModelError(
                f"a recurrent layer of {self.features} features reads a padded batch (B, T, {self.features}), found "
                f"{shape}; pad packed sequences, give one sequence a batch dimension, or change the features",
                features=self.features,
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
    """Base of :class:`Lstm` and :class:`Gru`: layers with initial values, whose forward returns only the hidden states."""

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
    """Stacked LSTM layers. They map (B, T, E) to the hidden states at every position, (B, T, D*H) for D directions."""

    own = LSTM


class Gru(_Sequences):
    """Stacked GRU layers. They map (B, T, E) to the hidden states at every position, (B, T, D*H) for D directions."""

    own = GRU


class LstmDirection(nn.Module):
    """One direction of an LSTM over E features with a state of size H.

    The gates are input, forget, cell, output; ``kernel`` is (4H, E), ``recurrent`` (4H, H), ``bias`` (4H,).
    """

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
        """Return the state (h, c) after the last step, each (B, H).

        Args:
            words: Embedded words (B, T, E).
            state: Initial (h, c), each (B, H).
            reverse: Run from the last word to the first.
        """
        x = words.transpose(0, 1)
        _, h, c = cells.lstm(x, self.kernel, self.recurrent, self.bias, *state, reverse=reverse)
        return h, c

    def zero_state(self, words: Tensor) -> State:
        """Return the initial state (h, c) of zeros, each (B, H), for the batch ``words`` (B, T, E)."""
        zeros = words.new_zeros(words.shape[0], self.hidden)
        return zeros, zeros


class BiLstm(nn.Module):
    """Bidirectional LSTM with dropout. Maps words (B, T, E) to the last hidden states of both directions (B, 2H).

    If ``skip`` is not 0, :class:`BiLstmStart` has computed the states after the first ``skip`` words of each direction.
    The input is then packed by :func:`pack`, (B, T*E + 4H), and only T - skip steps run. This is the paper's weak tier,
    truncated back-propagation (embracingfl.md 3.3).

    Args:
        features: Number E of features per word.
        hidden: Size H of the hidden states.
        length: Words T of a sample.
        rate: Dropout rate.
        skip: First words of each direction whose states are part of the input.
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
        """Number of time steps that each direction runs and differentiates."""
        return self.length - self.skip

    def forward(self, x: Tensor) -> Tensor:
        words, states = self._unpack(x)
        words = self.drop_in(words)
        forward, _ = self.forward_cell(words[:, self.skip :], states[0])
        reverse, _ = self.reverse_cell(words[:, : self.steps], states[1], reverse=True)
        out: Tensor = self.drop_out(torch.cat((forward, reverse), dim=1))
        return out

    def _unpack(self, x: Tensor) -> tuple[Tensor, tuple[State, State]]:
        """Return (words (B, T, E), (state of the forward direction, state of the reverse direction)); a state is (h, c)."""
        if self.skip == 0:
            return x, (self.forward_cell.zero_state(x), self.reverse_cell.zero_state(x))
        words, *h_and_c = torch.split(x, [self.length * self.features, *[self.hidden] * 4], dim=1)
        forward, reverse = (h_and_c[0], h_and_c[1]), (h_and_c[2], h_and_c[3])
        return words.reshape(-1, self.length, self.features), (forward, reverse)


class BiLstmStart(nn.Module):
    """Frozen first steps of a :class:`BiLstm`. Maps words (B, T, E) to the packed input of the rest (:func:`pack`).

    Its tensors have the names of :class:`BiLstm`, so both parts read the same global weights.

    Args:
        features: Number E of features per word.
        hidden: Size H of the hidden states.
        steps: Number of words that each direction runs over.
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
    """Return the input of a truncated :class:`BiLstm` as one tensor (B, T*E + 4H).

    It is the words, then h and c of the forward direction, then h and c of the reverse direction.

    Args:
        words: Embedded words (B, T, E).
        forward: State (h, c) of the forward direction, each (B, H).
        reverse: State (h, c) of the reverse direction.
    """
    return torch.cat((words.flatten(1), *forward, *reverse), dim=1)


def truncate(whole: BiLstm, skip: int) -> tuple[BiLstmStart, BiLstm]:
    """Split a bidirectional LSTM into (its frozen first steps, the trained rest). Both share its tensors.

    Args:
        whole: LSTM to split.
        skip: Number of words of each direction that the frozen part runs over.
    """
    start = BiLstmStart(whole.features, whole.hidden, skip)
    rest = BiLstm(whole.features, whole.hidden, whole.length, rate=whole.drop_in.p, skip=skip)
    for part in (start, rest):
        part.forward_cell, part.reverse_cell = whole.forward_cell, whole.reverse_cell
    return start, rest
