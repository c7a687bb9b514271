"""``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` of torch, run layer by layer with the operators of this package.

The modules stay what their authors made them: the rules replace the functions that their forward calls. Only packed
sequences, which are padded in a graph, and the list of weights that torch keeps beside the parameters need more
(:data:`recurring`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from edgefl.models.layers.recurrent import GRU, LSTM, Kind, States, run_layers
from edgefl.models.packed import Padded
from edgefl.models.swapped import Swap, heeding

Weights = Sequence[Tensor]
Direction = Callable[[Tensor, Weights, States, bool], States]
"""(sequence (T, B, E), weights, first state, whether to go backwards) -> hidden states (T, B, H) and the last state."""


def _rule(mode: str, *args: Any) -> Any:
    """Rule for ``torch.lstm`` and its like; leaves packed sequences, whose fourth argument is the weights, to torch."""
    if not isinstance(args[3], bool):
        return NotImplemented
    x, first, weights, biases, layers, rate, training, both, batch_first = args
    out, last = _layers(
        x.transpose(0, 1) if batch_first else x,
        (first,) if isinstance(first, Tensor) else tuple(first),
        list(weights),
        layers,
        both,
        rate if training else 0.0,
        _direction(mode, biases),
    )
    # Contiguous, because torch gives a dense layer that reads a view two ops instead of one.
    return (out.transpose(0, 1).contiguous() if batch_first else out), *last


def _layers(
    x: Tensor, first: States, weights: Weights, layers: int, both: bool, rate: float, run: Direction
) -> tuple[Tensor, States]:
    ends = ("", "_reverse") if both else ("",)
    count = len(weights) // (layers * len(ends))

    def one(sequence: Tensor, layer: int, end: str, state: States) -> States:
        start = (layer * len(ends) + ends.index(end)) * count
        return run(sequence, weights[start : start + count], state, bool(end))

    return run_layers(x, first, layers, ends, lambda _, below: F.dropout(below, rate) if rate else below, one)


def _direction(mode: str, biases: bool, lengths: Padded | None = None, *, given: bool = False) -> Direction:
    """Return the function that runs one layer in one direction. ``lengths``: a padded sequence with the lengths that end
    it; ``given``: its first state is not zero."""

    def run(x: Tensor, weights: Weights, first: States, reverse: bool) -> States:
        behind = None if lengths is None else lengths.behind
        projects = len(weights) > (4 if biases else 2)
        if mode not in _KINDS or projects:
            cell = partial(_CELLS[mode], projection=weights[-1]) if projects else _CELLS[mode]
            return _steps(cell, x, weights, first, reverse, biases, behind)
        kind = _KINDS[mode]
        if lengths is None:
            return kind.run(x, weights, first, reverse)
        return _ending(kind, Padded(x, lengths.lengths), weights, first, reverse, given)

    return run


Cell = Callable[[Tensor, States], States]


def _rnn(activation: Callable[[Tensor], Tensor], gates: Tensor, _state: States) -> States:
    return (activation(gates),)


def _projected_lstm(gates: Tensor, state: States, *, projection: Tensor) -> States:
    i, f, g, o = gates.chunk(4, dim=1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return F.linear(torch.sigmoid(o) * torch.tanh(c), projection), c


_KINDS: Mapping[str, Kind] = {"LSTM": LSTM, "GRU": GRU}
_CELLS: Mapping[str, Callable[..., States]] = {
    "LSTM": _projected_lstm,
    "RNN_TANH": partial(_rnn, torch.tanh),
    "RNN_RELU": partial(_rnn, torch.relu),
}


def _steps(
    cell: Cell,
    x: Tensor,
    weights: Weights,
    state: States,
    reverse: bool,
    biases: bool,
    behind: Tensor | None,
) -> States:
    """Run step by step. Where ``behind`` (T, B) is true, padding, the state stays."""
    outer, inner = (weights[2], weights[3]) if biases else (None, None)
    inputs = F.linear(x, weights[0], outer)
    steps = range(x.shape[0])
    states: list[Tensor] = []
    for t in reversed(steps) if reverse else steps:
        after = cell(inputs[t] + F.linear(state[0], weights[1], inner), state)
        if behind is not None:
            column = behind[t].unsqueeze(1)
            after = tuple(torch.where(column, old, new) for old, new in zip(state, after, strict=True))
        state = after
        states.append(state[0])
    return torch.stack(states[::-1] if reverse else states), *state


def _ending(kind: Kind, x: Padded, weights: Weights, first: States, reverse: bool, given: bool) -> States:
    """Run over sequences of different lengths. Backwards, padding comes first: a first state of zeros stays so there, and
    another one needs sequences that are turned around."""
    if not reverse or not given:
        return _heeding(kind, x, weights, first, reverse)
    turned = Padded(x.padded.gather(0, _turned(x, x.padded)), x.lengths)
    states, *last = _heeding(kind, turned, weights, first, False)
    return states.gather(0, _turned(x, states)), *last


def _heeding(kind: Kind, x: Padded, weights: Weights, first: States, reverse: bool) -> States:
    """Run with a further input that opens or shuts the gates where a sequence has ended. An LSTM's h does not stay as it
    is by that: it follows o."""
    kernel, recurrent, *biases = weights
    size = recurrent.shape[1]
    column = torch.cat([kernel.new_full((size, 1), each) for each in kind.standing])
    entries = torch.cat((x.padded, x.behind.unsqueeze(-1).to(x.padded.dtype)), dim=2)
    states, *last = kind.run(
        entries, [torch.cat((kernel, column), dim=1), recurrent, *biases], first, reverse
    )
    if kind.carried > 1 and not reverse:
        last[0] = Padded(states, x.lengths).last
    return states, *last


def _turned(x: Padded, entries: Tensor) -> Tensor:
    """Return where each entry of ``entries`` (T, B, F) comes from if every sequence is turned around without padding."""
    steps = torch.arange(entries.shape[0], device=entries.device).unsqueeze(1)
    places = torch.where(x.behind, steps, x.lengths - 1 - steps)
    return places.unsqueeze(-1).expand(entries.shape)


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: partial(_rule, "LSTM"),
    torch.gru: partial(_rule, "GRU"),
    torch.rnn_tanh: partial(_rule, "RNN_TANH"),
    torch.rnn_relu: partial(_rule, "RNN_RELU"),
}
"""By function; a rule returns NotImplemented for a call that it leaves to torch."""


def _forward(original: Callable[..., Any], self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    if not isinstance(input, Padded):
        return original(self, input, hx)
    self._update_flat_weights()
    sizes = [self.proj_size or self.hidden_size] + [self.hidden_size] * (self.mode == "LSTM")
    rows = self.num_layers * (2 if self.bidirectional else 1)
    first = (hx,) if isinstance(hx, Tensor) else hx
    if first is None:
        first = tuple(input.padded.new_zeros(rows, input.padded.shape[1], size) for size in sizes)
    out, last = _layers(
        input.padded,
        first,
        cast(list[Tensor], self._flat_weights),
        self.num_layers,
        self.bidirectional,
        self.dropout if self.training else 0.0,
        _direction(self.mode, self.bias, input, given=hx is not None),
    )
    return Padded(out, input.lengths), last if len(last) > 1 else last[0]


def _gather_weights(self: nn.RNNBase) -> None:
    """Gather the weights as torch does where none was replaced: a parametrization moves its state each time it is read."""
    for name in self._flat_weights_names:
        if parametrize.is_parametrized(self, name):
            hasattr(self, name)
            getattr(self, name)
            break
    self._init_flat_weights()


def _ours(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    return heeding(lambda: recurring, original, ours)


recurring = Swap(
    *(
        (kind, "forward", _ours(kind.forward, partial(_forward, kind.forward)))
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    ),
    (nn.RNNBase, "_update_flat_weights", _ours(nn.RNNBase._update_flat_weights, _gather_weights)),
)
"""Inside, torch's recurrent layers of this thread read :class:`Padded`, and their weights by name."""
