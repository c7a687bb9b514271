"""Torch's recurrent layers in a graph: ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, computed by the operators of this package.

:data:`RULES` replace the functions that the layers' forward calls. In the context :data:`recurring`, the layers also
read their weights by name, and accept padded sequences instead of packed ones.

The number of rows of a packed sequence at a step depends on values, which no graph can represent. In the context
:data:`padding`, ``pack_padded_sequence`` returns a :class:`PaddedSequence`, and ``pad_packed_sequence`` accepts one.
The result is as long as the padded input was, as in torch with ``total_length``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, rnn
from torch.nn.utils.rnn import PackedSequence

from edgefl.errors import ModelError
from edgefl.models.layers.recurrent import GRU, LSTM, CellKind, States, run_layers
from edgefl.models.torch_functions.patches import ThreadPatch
from edgefl.models.user_code import at_line


class _PaddedFields(NamedTuple):
    padded: Tensor
    lengths: Tensor


class PaddedSequence(_PaddedFields):
    """Replacement of a packed sequence: ``padded`` (T, B, ...) with ``lengths`` (B,). Entries behind a sequence's end are
    ignored.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ModelError(
            f"a packed sequence is padded in a graph, and has no {name!r}{at_line()}: RNN, LSTM and GRU read it, and "
            "pad_packed_sequence; put other layers before it is packed, or behind pad_packed_sequence",
            name=name,
        )

    # So that `isinstance(x, PackedSequence)` in people's code holds.
    __class__ = property(lambda _: PackedSequence)

    @property
    def is_padding(self) -> Tensor:
        """Mask of the entries behind the end of their sequence, bool (T, B)."""
        steps = torch.arange(self.padded.shape[0], device=self.padded.device)
        return steps.unsqueeze(1) >= self.lengths

    @property
    def last(self) -> Tensor:
        """Last entry of each sequence, (B, ...)."""
        steps = torch.arange(self.padded.shape[0], device=self.padded.device)
        at = (steps.unsqueeze(1) == self.lengths - 1).unsqueeze(-1)
        return torch.where(at, self.padded, self.padded.new_zeros(())).sum(0)


def pack(input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False) -> PaddedSequence:
    """Return the padded sequence for the arguments of ``torch.nn.utils.rnn.pack_padded_sequence``.

    Rows need not be sorted by length, and are not sorted.
    """
    sequence = input.transpose(0, 1) if batch_first else input
    whole = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, dtype=torch.int64)
    return PaddedSequence(sequence, whole.to(torch.int64))


def unpack(
    sequence: PaddedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sequences, lengths) like ``torch.nn.utils.rnn.pad_packed_sequence``.

    Without ``total_length`` the sequences keep the length of the padded input, and a warning says so.

    Args:
        sequence: Padded sequence.
        batch_first: Return (B, T, ...) instead of (T, B, ...).
        padding_value: Value behind the end of a sequence.
        total_length: Length T of the result. Longer sequences are cut.
    """
    entries, lengths = sequence
    if total_length is None:
        warnings.warn(
            f"pad_packed_sequence{at_line()} gives sequences of {entries.shape[0]} steps, as many as were packed, where "
            "torch cuts them to the longest of each batch: give total_length, and divide sums over steps by the lengths",
            stacklevel=2,
        )
    behind = sequence.is_padding.reshape(*entries.shape[:2], *[1] * (entries.dim() - 2))
    whole = torch.where(behind, entries.new_full((), padding_value), entries)
    if total_length is not None and total_length < entries.shape[0]:
        whole = whole[:total_length]
    elif total_length is not None and total_length > entries.shape[0]:
        more = entries.new_full((total_length - entries.shape[0], *entries.shape[1:]), padding_value)
        whole = torch.cat((whole, more))
    return whole.transpose(0, 1) if batch_first else whole, lengths


def _copy_function(function: Any) -> Any:
    return FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


_pack, _unpack = _copy_function(rnn.pack_padded_sequence), _copy_function(rnn.pad_packed_sequence)


# The code that replaces torch's. It has the globals of torch's module, so it imports its names.
def _packing(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from edgefl.models.torch_functions.recurrent import pack_dispatch

    return pack_dispatch(input, lengths, batch_first, enforce_sorted)


def _unpacking(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    from edgefl.models.torch_functions.recurrent import unpack_dispatch

    return unpack_dispatch(sequence, batch_first, padding_value, total_length)


padding = ThreadPatch()
"""In this context, packed sequences of the thread are :class:`PaddedSequence`."""
# The functions' code, because people import the functions by name.
padding.replace(rnn.pack_padded_sequence, "__code__", _packing.__code__)
padding.replace(rnn.pad_packed_sequence, "__code__", _unpacking.__code__)


def pack_dispatch(input: Any, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """Call :func:`pack` in threads inside of :data:`padding`, and torch's function in others."""
    if not padding.is_active():
        return _pack(input, lengths, batch_first, enforce_sorted)
    return pack(input, lengths, batch_first)


def unpack_dispatch(sequence: Any, *arguments: Any) -> Any:
    """Call :func:`unpack` for a padded sequence, and torch's function for a packed one."""
    return (unpack if isinstance(sequence, PaddedSequence) else _unpack)(sequence, *arguments)


Weights = Sequence[Tensor]
Direction = Callable[[Tensor, Weights, States, bool], States]
"""Function (sequence (T, B, E), weights, initial state, reverse) that returns hidden states (T, B, H) and
the last state."""


def _rule(mode: str, *args: Any) -> Any:
    """Compute ``torch.lstm`` and similar functions by operators that a graph can contain.

    Returns (hidden states, tensors of the last state), or NotImplemented for packed sequences.

    Args:
        mode: Kind of layer, as torch names it: ``LSTM``, ``GRU``, ``RNN_TANH`` or ``RNN_RELU``.
        args: Arguments of the torch function.
    """
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
    """Run all layers. Return (hidden states of the last layer (T, B, D*H), tensors of the final state).

    Args:
        x: Sequence (T, B, E).
        first: Tensors of the initial state, each (layers*D, B, H) for D directions.
        weights: Weights of all layers and directions, in torch's order.
        layers: Number of layers.
        both: True for two directions.
        rate: Rate of the dropout between layers.
        run: Function that runs one layer in one direction.
    """
    ends = ("", "_reverse") if both else ("",)
    count = len(weights) // (layers * len(ends))

    def one(sequence: Tensor, layer: int, end: str, state: States) -> States:
        start = (layer * len(ends) + ends.index(end)) * count
        return run(sequence, weights[start : start + count], state, bool(end))

    return run_layers(x, first, layers, ends, lambda _, below: F.dropout(below, rate) if rate else below, one)


def _direction(
    mode: str, biases: bool, lengths: PaddedSequence | None = None, *, has_state: bool = False
) -> Direction:
    """Return the function that runs one layer in one direction.

    Args:
        mode: Kind of layer, as torch names it.
        biases: True if the layer has biases.
        lengths: Padded sequence with the lengths of the input. None: all sequences have full length.
        has_state: True if the caller passed an initial state, which may differ from zero.
    """

    def run(x: Tensor, weights: Weights, first: States, reverse: bool) -> States:
        padding = None if lengths is None else lengths.is_padding
        projects = len(weights) > (4 if biases else 2)
        if mode not in _KINDS or projects:
            cell = partial(_CELLS[mode], projection=weights[-1]) if projects else _CELLS[mode]
            return _steps(cell, x, weights, first, reverse, biases, padding)
        kind = _KINDS[mode]
        if lengths is None:
            return kind.run(x, weights, first, reverse)
        return _run_padded(kind, PaddedSequence(x, lengths.lengths), weights, first, reverse, has_state)

    return run


Cell = Callable[[Tensor, States], States]


def _rnn(activation: Callable[[Tensor], Tensor], gates: Tensor, _state: States) -> States:
    return (activation(gates),)


def _projected_lstm(gates: Tensor, state: States, *, projection: Tensor) -> States:
    i, f, g, o = gates.chunk(4, dim=1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return F.linear(torch.sigmoid(o) * torch.tanh(c), projection), c


_KINDS: Mapping[str, CellKind] = {"LSTM": LSTM, "GRU": GRU}
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
    padding: Tensor | None,
) -> States:
    """Run a layer step by step, for kinds without an operator. Return the hidden states (T, B, H), then the last state.

    Args:
        cell: Function (gates' inputs, state) that returns the next state.
        x: Sequence (T, B, E).
        weights: Kernel and recurrent kernel, then two biases if ``biases``.
        state: Tensors of the initial state, each (B, H).
        reverse: Run from the last position to the first.
        biases: True if the layer has biases.
        padding: bool (T, B): True behind the end of a sequence, where the state does not change. None: no padding.
    """
    outer, inner = (weights[2], weights[3]) if biases else (None, None)
    inputs = F.linear(x, weights[0], outer)
    steps = range(x.shape[0])
    states: list[Tensor] = []
    for t in reversed(steps) if reverse else steps:
        after = cell(inputs[t] + F.linear(state[0], weights[1], inner), state)
        if padding is not None:
            column = padding[t].unsqueeze(1)
            after = tuple(torch.where(column, old, new) for old, new in zip(state, after, strict=True))
        state = after
        states.append(state[0])
    return torch.stack(states[::-1] if reverse else states), *state


def _run_padded(
    kind: CellKind, x: PaddedSequence, weights: Weights, first: States, reverse: bool, has_state: bool
) -> States:
    """Run one layer in one direction over sequences of different lengths. The result is like that of :meth:`CellKind.run`.

    In reverse, padding comes first. An initial state of zeros stays zero there. If ``has_state`` says that it may
    differ from zero, the sequences are reversed without their padding first.
    """
    if not reverse or not has_state:
        return _run_gated(kind, x, weights, first, reverse)
    reversed_sequence = PaddedSequence(x.padded.gather(0, _reversed_positions(x, x.padded)), x.lengths)
    states, *last = _run_gated(kind, reversed_sequence, weights, first, False)
    return states.gather(0, _reversed_positions(x, states)), *last


def _run_gated(kind: CellKind, x: PaddedSequence, weights: Weights, first: States, reverse: bool) -> States:
    """Run one layer in one direction so that the state does not change behind the end of a sequence.

    An additional input saturates the gates there. An LSTM's h depends on the gate o and does change, so it is read at the
    last entry.
    """
    kernel, recurrent, *biases = weights
    size = recurrent.shape[1]
    column = torch.cat([kernel.new_full((size, 1), each) for each in kind.hold])
    entries = torch.cat((x.padded, x.is_padding.unsqueeze(-1).to(x.padded.dtype)), dim=2)
    states, *last = kind.run(
        entries, [torch.cat((kernel, column), dim=1), recurrent, *biases], first, reverse
    )
    if kind.state_tensors > 1 and not reverse:
        last[0] = PaddedSequence(states, x.lengths).last
    return states, *last


def _reversed_positions(x: PaddedSequence, entries: Tensor) -> Tensor:
    """Return the position that each entry is read from if each sequence of ``x`` is reversed without its padding.

    The result is int64, of the shape of ``entries`` (T, B, F), for ``gather`` along dimension 0.
    """
    steps = torch.arange(entries.shape[0], device=entries.device).unsqueeze(1)
    places = torch.where(x.is_padding, steps, x.lengths - 1 - steps)
    return places.unsqueeze(-1).expand(entries.shape)


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: partial(_rule, "LSTM"),
    torch.gru: partial(_rule, "GRU"),
    torch.rnn_tanh: partial(_rule, "RNN_TANH"),
    torch.rnn_relu: partial(_rule, "RNN_RELU"),
}
"""Rules by torch function. A rule returns NotImplemented for a call that torch itself should compute."""


def _forward(original: Callable[..., Any], self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Run a recurrent layer of torch; the replacement of ``nn.RNNBase.forward``.

    A :class:`PaddedSequence` is computed by this package's operators, any other input by torch's ``original``.
    """
    if not isinstance(input, PaddedSequence):
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
        _direction(self.mode, self.bias, input, has_state=hx is not None),
    )
    return PaddedSequence(out, input.lengths), last if len(last) > 1 else last[0]


def _gather_weights(self: nn.RNNBase) -> None:
    """Gather the weights of a recurrent layer into its list, reading each once; replaces ``_update_flat_weights``.

    A parametrization changes its state with each read.
    """
    for name in self._flat_weights_names:
        if parametrize.is_parametrized(self, name):
            hasattr(self, name)
            getattr(self, name)
            break
    self._init_flat_weights()


recurring = ThreadPatch()
"""In this context, torch's recurrent layers of the thread accept :class:`PaddedSequence` and read their weights by name."""
for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    recurring.replace_function(_kind, "forward", partial(_forward, _kind.forward))
recurring.replace_function(nn.RNNBase, "_update_flat_weights", _gather_weights)
