"""Sums on a torch device, from encoded updates: one-bit codes by Triton if it is available, all others by torch.

float64 and int64 arithmetic follow IEEE 754 on every device, and integers are added, so all devices give the same
bits as the CPU. Updates stay encoded on the device. To measure a GPU::

    python -m benchmarks aggregate --processor cuda --on-device --parameters 1000000000 --clients 64
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgefl.wire.update.form import CodeEncoding, FloatEncoding, SparseEncoding
from edgefl_server.aggregate.accumulator import ArrayPool, Call, ModelStep, PartSums
from edgefl_server.aggregate.adders import CheckedArrays, UpdateBatch, code_values
from edgefl_server.aggregate.scatter import (
    FIRST,
    LENGTH,
    ROW,
    SOURCE,
    TARGET,
    Integers,
    SectionBlocks,
    TierBlocks,
)

# Updates on a torch device, decoded a slab of entries at a time: every form, with torch alone.
#
# A slab's places, rows and targets are worked out once for the whole batch; each update's integers are then read for it. ::
#
#     batch = Batch(pieces, updates, device)
#     reader = reader_of(batch, work, factors)
#     for slab in slabs(work, batch):
#         part = reader.fixed(0, slab) + reader.fixed(1, slab)        # int64, one per entry of the slab

SLAB = 1 << 20
"""Entries decoded at a time, exceeded by at most one block. Each needs about 100 bytes of scratch memory."""

_WORD = 4

Factors = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EntrySlab:
    """Positions of consecutive entries of a batch, about SLAB at most, each int64 [entries].

    Attributes:
        at: First bit or element in the source array.
        source: Index of the source array.
        row: Row of the scale.
        target: Position in the flat model.
    """

    at: torch.Tensor
    source: torch.Tensor
    row: torch.Tensor
    target: torch.Tensor


def slabs(work: SectionBlocks, batch: DeviceBatch) -> Iterator[EntrySlab]:
    """Yield the positions of all entries of the section ``work`` (tensors with one encoding), in order.

    Each item has about SLAB entries.
    """
    step = work.encoding.bits if isinstance(work.encoding, CodeEncoding) else 1
    slab_of = np.cumsum(work.blocks[:, LENGTH]) // SLAB
    edges = [0, *(np.flatnonzero(np.diff(slab_of)) + 1).tolist(), len(slab_of)]
    for start, stop in pairwise(edges):
        blocks = torch.from_numpy(work.blocks[start:stop]).to(batch.device)
        lengths = blocks[:, LENGTH]
        block = torch.repeat_interleave(lengths)
        within = torch.arange(len(block), device=batch.device) - (lengths.cumsum(0) - lengths)[block]
        target = blocks[:, TARGET][block] + within
        listed = target - batch.pieces.model
        target = torch.where(listed < 0, target, batch.index[listed.clamp(0, len(batch.index) - 1)])
        yield EntrySlab(
            blocks[:, FIRST][block] + step * within, blocks[:, SOURCE][block], blocks[:, ROW][block], target
        )


class DeviceBatch:
    """Encoded arrays of updates of one layout, for a torch device. Each array is copied there when it is first used."""

    def __init__(self, pieces: TierBlocks, updates: Sequence[CheckedArrays], device: torch.device) -> None:
        self.pieces = pieces
        self.updates = updates
        self.device = device
        self._rows: dict[int, torch.Tensor] = {}

    @cached_property
    def index(self) -> torch.Tensor:
        """Positions of scattered entries in the model, on the device."""
        return torch.from_numpy(self.pieces.index).to(self.device)

    def rows(self, source: int) -> torch.Tensor:
        """Return array number ``source`` of all updates on the device, [updates, length]. The first call copies it
        there.

        Byte arrays are padded with at least 64 zero bits, to a multiple of 64 bits. bfloat16 values are int16 bit
        patterns.
        """
        if source not in self._rows:
            arrays = [update.arrays[source].reshape(-1) for update in self.updates]
            dtype = np.dtype(np.int16) if arrays[0].dtype == np.uint16 else arrays[0].dtype
            length = arrays[0].size
            padded = (-(-length // _WORD) + 1) * _WORD if dtype == np.uint8 else length
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            staged = torch.zeros(padded, dtype=kind, pin_memory=self.device.type == "cuda")
            rows = torch.empty(len(arrays), padded, dtype=kind, device=self.device)
            for row, array in zip(rows, arrays, strict=True):
                staged.numpy()[:length] = array.view(dtype)
                row.copy_(staged)
            self._rows[source] = rows
        return self._rows[source]

    def join_arrays(self, used: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (concatenation of the arrays ``used``, first entry of each source in it).

        The first is [updates, entries]. The second is int64 [sources], 0 for sources that are not in ``used``.
        """
        rows = [self.rows(source) for source in used]
        starts = torch.zeros(len(self.pieces.sources), dtype=torch.int64)
        starts[list(used)] = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0)[:-1]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, 1)), starts.to(self.device)


class SectionReader(Protocol):
    """Reader of one section (a group of tensors with one encoding) of a batch, as fixed-point values."""

    def fixed(self, k: int, slab: EntrySlab) -> torch.Tensor:
        """Return the fixed-point values that update number ``k`` adds to the entries of ``slab``, int64 [entries].

        The caller passes all slabs to each update once, in order.
        """


class _CodeReader:
    """Reader of a section (tensors with one encoding) of codes: looks up each code's fixed-point value in the update's
    table.
    """

    def __init__(self, batch: DeviceBatch, work: SectionBlocks, factors: Factors, bits: int) -> None:
        values = code_values(batch.pieces, work, batch.updates, factors)
        self._values = torch.from_numpy(values).to(batch.device).flatten(1)
        self._codes = batch.rows(int(work.blocks[0, SOURCE]))
        self._bits = bits

    def fixed(self, k: int, slab: EntrySlab) -> torch.Tensor:
        byte, shift = slab.at >> 3, slab.at & 7
        pair = self._codes[k][byte].long() | self._codes[k][byte + 1].long() << 8
        code = pair >> shift & ((1 << self._bits) - 1)
        return self._values[k][(slab.row << self._bits) + code]


class _FloatReader:
    """Reader of a section (tensors with one encoding) of floats: multiplies by the update's factor and rounds half to
    even.
    """

    def __init__(self, batch: DeviceBatch, work: SectionBlocks, factors: Factors, dtype: str) -> None:
        rows, self._starts = batch.join_arrays(np.unique(work.blocks[:, SOURCE]).tolist())
        self._rows = rows.view(torch.bfloat16) if dtype == "bfloat16" else rows
        self._factors = factors.tolist()

    def fixed(self, k: int, slab: EntrySlab) -> torch.Tensor:
        return _to_fixed(self._rows[k][self._starts[slab.source] + slab.at], self._factors[k])


class _SparseReader:
    """Reader of a section (tensors with one encoding) of masked floats.

    An entry whose mask bit is 1 takes the next stored value, and any other entry is 0.
    """

    def __init__(self, batch: DeviceBatch, work: SectionBlocks, factors: Factors) -> None:
        self._mask = batch.rows(int(work.blocks[0, SOURCE]))
        self._values = batch.rows(batch.pieces.sources.index("values"))
        self._next = torch.full((len(factors),), work.kept, dtype=torch.int64, device=batch.device)
        self._factors = factors.tolist()

    def fixed(self, k: int, slab: EntrySlab) -> torch.Tensor:
        mask = (self._mask[k][slab.at >> 3].long() >> (slab.at & 7) & 1).bool()
        ends = self._next[k] + mask.long().cumsum(0)
        place = torch.where(mask, ends - 1, 0)
        self._next[k] = ends[-1]
        return torch.where(mask, _to_fixed(self._values[k][place], self._factors[k]), 0)


def reader_of(batch: DeviceBatch, work: SectionBlocks, factors: Factors) -> SectionReader:
    """Return the reader for the section ``work`` (a group of tensors with one encoding) of the batch.

    ``factors``, float64 [updates], multiply the values of the updates.
    """
    match work.encoding:
        case CodeEncoding(bits=bits):
            return _CodeReader(batch, work, factors, bits)
        case FloatEncoding(dtype=dtype):
            return _FloatReader(batch, work, factors, dtype)
        case SparseEncoding():
            return _SparseReader(batch, work, factors)


def _to_fixed(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values.double().mul_(factor).round_().long()


try:
    from edgefl_server.aggregate import triton_kernels
except ImportError:  # there is no triton for this platform
    triton_kernels = None  # type: ignore[assignment]


class TorchAccumulator:
    """Accumulator (integer sums over a flat model of ``size`` entries) on a torch device.

    ``triton``: add one-bit codes with Triton. None does so on CUDA if triton is installed.
    """

    def __init__(self, size: int, device: torch.device, triton: bool | None = None) -> None:
        self._device = device
        self.size = size
        self.spare = ArrayPool()
        self._sums = torch.zeros(size, dtype=torch.int64, device=device)
        self._triton = triton_kernels is not None and device.type == "cuda" if triton is None else triton

    def add(
        self, pieces: TierBlocks, updates: Sequence[CheckedArrays], factors: npt.NDArray[np.float64]
    ) -> None:
        batch = DeviceBatch(pieces, updates, self._device)
        for work in pieces.works:
            if not len(work.blocks):
                continue
            if self._triton and isinstance(work.encoding, CodeEncoding) and work.encoding.bits == 1:
                triton_kernels.add_signs(
                    batch.rows(int(work.blocks[0, SOURCE])),
                    code_values(pieces, work, updates, factors),
                    torch.from_numpy(work.blocks).to(self._device),
                    batch.index,
                    self._sums,
                )
                continue
            reader = reader_of(batch, work, factors)
            for slab in slabs(work, batch):
                part = torch.zeros_like(slab.target)
                for k in range(len(updates)):
                    part += reader.fixed(k, slab)
                self._sums[slab.target] += part  # regions name no entry twice

    def by_parts(self, pieces: TierBlocks) -> bool:
        """Return False: updates must be added with :meth:`add`, because one kernel launch per part of the model costs
        too much.
        """
        return False

    def sum_parts(self, batches: Sequence[UpdateBatch]) -> PartSums:
        return self.sums().__getitem__

    def plan_renewal(
        self, batches: Sequence[UpdateBatch], renewal: ModelStep, weights: Integers, scale: float
    ) -> list[Call]:
        return []

    def sums(self) -> Integers:
        sums: Integers = self._sums.cpu().numpy()
        return sums

    def take(self, sums: Integers) -> None:
        self._sums += torch.tensor(sums).to(self._device)

    def reset(self) -> None:
        self._sums.zero_()
