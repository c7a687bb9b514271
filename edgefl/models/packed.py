"""Packed sequences in a graph: padded ones beside their lengths, which recurrent layers heed.

How many rows a packed sequence has at a step depends on values, which no graph can hold. Inside of :data:`padded`
``pack_padded_sequence`` gives :class:`Padded` instead, and ``pad_packed_sequence`` takes it: to the length that the padded
sequences had, as torch does with ``total_length``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from edgefl.errors import ModelError
from edgefl.models.swapped import Swap
from edgefl.models.user_code import place


class _Fields(NamedTuple):
    padded: Tensor
    lengths: Tensor


class Padded(_Fields):
    """``padded`` (T, B, ...) and ``lengths`` (B,): what stands behind a sequence's end counts for nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ModelError(
            f"a packed sequence is padded in a graph, and has no {name!r}{place()}: RNN, LSTM and GRU read it, and "
            "pad_packed_sequence; put other layers before it is packed, or behind pad_packed_sequence",
            name=name,
        )

    # So that `isinstance(x, PackedSequence)` in people's code holds.
    __class__ = property(lambda _: PackedSequence)

    @property
    def behind(self) -> Tensor:
        """Which entries are padding: bool (T, B)."""
        steps = torch.arange(self.padded.shape[0], device=self.padded.device)
        return steps.unsqueeze(1) >= self.lengths

    @property
    def last(self) -> Tensor:
        """The last entry of each sequence, (B, ...)."""
        steps = torch.arange(self.padded.shape[0], device=self.padded.device)
        at = (steps.unsqueeze(1) == self.lengths - 1).unsqueeze(-1)
        return torch.where(at, self.padded, self.padded.new_zeros(())).sum(0)


def packed(input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False) -> Padded:
    """As ``torch.nn.utils.rnn.pack_padded_sequence``; rows keep their order."""
    sequence = input.transpose(0, 1) if batch_first else input
    whole = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, dtype=torch.int64)
    return Padded(sequence, whole.to(torch.int64))


def unpacked(
    sequence: Padded, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """As ``torch.nn.utils.rnn.pad_packed_sequence``; without ``total_length`` as long as what was packed."""
    entries, lengths = sequence
    if total_length is None:
        warnings.warn(
            f"pad_packed_sequence{place()} gives sequences of {entries.shape[0]} steps, as many as were packed, where torch "
            "cuts them to the longest of each batch: give total_length, and divide sums over steps by the lengths",
            stacklevel=2,
        )
    behind = sequence.behind.reshape(*entries.shape[:2], *[1] * (entries.dim() - 2))
    whole = torch.where(behind, entries.new_full((), padding_value), entries)
    if total_length is not None and total_length < entries.shape[0]:
        whole = whole[:total_length]
    elif total_length is not None and total_length > entries.shape[0]:
        more = entries.new_full((total_length - entries.shape[0], *entries.shape[1:]), padding_value)
        whole = torch.cat((whole, more))
    return whole.transpose(0, 1) if batch_first else whole, lengths


def _copied(function: Any) -> Any:
    return FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


_pack, _unpack = _copied(rnn.pack_padded_sequence), _copied(rnn.pad_packed_sequence)


# The code that runs in place of torch's. It finds its names among those of torch's module.
def _packing(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from edgefl.models.packed import pack_or_torch_s

    return pack_or_torch_s(input, lengths, batch_first, enforce_sorted)


def _unpacking(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    from edgefl.models.packed import unpack_or_torch_s

    return unpack_or_torch_s(sequence, batch_first, padding_value, total_length)


padded = Swap(
    (rnn.pack_padded_sequence, "__code__", _packing.__code__),
    (rnn.pad_packed_sequence, "__code__", _unpacking.__code__),
)
"""Inside, this thread's packed sequences are :class:`Padded`. It changes the functions' code: people import them by name."""


def pack_or_torch_s(input: Any, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """What is in place of torch's function meanwhile."""
    if not padded.here():
        return _pack(input, lengths, batch_first, enforce_sorted)
    return packed(input, lengths, batch_first)


def unpack_or_torch_s(sequence: Any, *arguments: Any) -> Any:
    """As :func:`pack_or_torch_s`."""
    return (unpacked if isinstance(sequence, Padded) else _unpack)(sequence, *arguments)
