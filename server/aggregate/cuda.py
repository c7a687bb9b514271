"""The sums on a torch device, from updates of any form: one bit per entry by Triton where it runs, the rest by torch.

float64 and int64 arithmetic follow IEEE 754 there too, and integers are added, so every device gives the bits that the
processor gives. A batch lies on the device as it travelled; no dense update is built.
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

from edgefl.system.spare import Spare
from edgefl.wire.update.form import Codes, Sparse, Values
from server.aggregate.accumulator import Ended, Renewal
from server.aggregate.adders import Checked, Waiting, code_values
from server.aggregate.scatter import FIRST, LENGTH, ROW, SOURCE, TARGET, Integers, Pieces, Work
from server.aggregate.threads import Call

# Updates on a torch device, decoded a slab of entries at a time: every form, with torch alone.
#
# A slab's places, rows and targets are worked out once for the whole batch; each update's integers are then read for it. ::
#
#     batch = Batch(pieces, updates, device)
#     reader = reader_of(batch, work, factors)
#     for slab in slabs(work, batch):
#         part = reader.fixed(0, slab) + reader.fixed(1, slab)        # int64, one per entry of the slab

SLAB = 1 << 20
"""Entries decoded at a time, and at most a block more, each with about 100 bytes of scratch."""

_WORD = 4

Factors = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Slab:
    """Of up to SLAB entries, int64: first bit or element, number of its array, row of its scale, place in the model."""

    at: torch.Tensor
    source: torch.Tensor
    row: torch.Tensor
    target: torch.Tensor


def slabs(work: Work, batch: Batch) -> Iterator[Slab]:
    """The blocks of ``work``, in their order."""
    step = work.encoding.bits if isinstance(work.encoding, Codes) else 1
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
        yield Slab(
            blocks[:, FIRST][block] + step * within, blocks[:, SOURCE][block], blocks[:, ROW][block], target
        )


class Batch:
    """The arrays of some updates of one tier, each copied to the device when it is first asked for."""

    def __init__(self, pieces: Pieces, updates: Sequence[Checked], device: torch.device) -> None:
        self.pieces = pieces
        self.updates = updates
        self.device = device
        self._rows: dict[int, torch.Tensor] = {}

    @cached_property
    def index(self) -> torch.Tensor:
        """The scattered targets of the pieces."""
        return torch.from_numpy(self.pieces.index).to(self.device)

    def rows(self, source: int) -> torch.Tensor:
        """Array ``source`` of each update: [updates, length]. Bytes are followed by a word of zeros at least, up to a
        multiple of words; bfloat16 arrives as its 16 bits."""
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

    def joined(self, used: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Arrays ``used`` one after the other, [updates, entries], and where each source begins."""
        rows = [self.rows(source) for source in used]
        starts = torch.zeros(len(self.pieces.sources), dtype=torch.int64)
        starts[list(used)] = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0)[:-1]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, 1)), starts.to(self.device)


class Reader(Protocol):
    """Of one section of a batch."""

    def fixed(self, k: int, slab: Slab) -> torch.Tensor:
        """What update ``k`` adds to each entry of the slab, int64. Slabs come once per update, in their order."""


class _CodeReader:
    """What each code adds, looked up in a table of the update."""

    def __init__(self, batch: Batch, work: Work, factors: Factors, bits: int) -> None:
        values = code_values(batch.pieces, work, batch.updates, factors)
        self._values = torch.from_numpy(values).to(batch.device).flatten(1)
        self._codes = batch.rows(int(work.blocks[0, SOURCE]))
        self._bits = bits

    def fixed(self, k: int, slab: Slab) -> torch.Tensor:
        byte, shift = slab.at >> 3, slab.at & 7
        pair = self._codes[k][byte].long() | self._codes[k][byte + 1].long() << 8
        code = pair >> shift & ((1 << self._bits) - 1)
        return self._values[k][(slab.row << self._bits) + code]


class _FloatReader:
    """Floats times the factor of the update, rounded half to even."""

    def __init__(self, batch: Batch, work: Work, factors: Factors, dtype: str) -> None:
        rows, self._starts = batch.joined(np.unique(work.blocks[:, SOURCE]).tolist())
        self._rows = rows.view(torch.bfloat16) if dtype == "bfloat16" else rows
        self._factors = factors.tolist()

    def fixed(self, k: int, slab: Slab) -> torch.Tensor:
        return _rounded(self._rows[k][self._starts[slab.source] + slab.at], self._factors[k])


class _SparseReader:
    """The next value where the mask has a 1."""

    def __init__(self, batch: Batch, work: Work, factors: Factors) -> None:
        self._mask = batch.rows(int(work.blocks[0, SOURCE]))
        self._values = batch.rows(batch.pieces.sources.index("values"))
        self._next = torch.full((len(factors),), work.kept, dtype=torch.int64, device=batch.device)
        self._factors = factors.tolist()

    def fixed(self, k: int, slab: Slab) -> torch.Tensor:
        mask = (self._mask[k][slab.at >> 3].long() >> (slab.at & 7) & 1).bool()
        ends = self._next[k] + mask.long().cumsum(0)
        place = torch.where(mask, ends - 1, 0)
        self._next[k] = ends[-1]
        return torch.where(mask, _rounded(self._values[k][place], self._factors[k]), 0)


def reader_of(batch: Batch, work: Work, factors: Factors) -> Reader:
    """What reads the entries of ``work``; ``factors`` (float64 [updates]) is what each update is multiplied with."""
    match work.encoding:
        case Codes(bits=bits):
            return _CodeReader(batch, work, factors, bits)
        case Values(dtype=dtype):
            return _FloatReader(batch, work, factors, dtype)
        case Sparse():
            return _SparseReader(batch, work, factors)


def _rounded(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values.double().mul_(factor).round_().long()


try:
    from server.aggregate import triton_kernels
except ImportError:  # there is no triton for this platform
    triton_kernels = None  # type: ignore[assignment]


class TorchAccumulator:
    """Sums on ``device``. ``triton``: whether one bit per entry goes through Triton; None: on CUDA, if it is installed."""

    def __init__(self, size: int, device: torch.device, triton: bool | None = None) -> None:
        self._device = device
        self.size = size
        self.spare = Spare()
        self._sums = torch.zeros(size, dtype=torch.int64, device=device)
        self._triton = triton_kernels is not None and device.type == "cuda" if triton is None else triton

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: npt.NDArray[np.float64]) -> None:
        batch = Batch(pieces, updates, self._device)
        for work in pieces.works:
            if not len(work.blocks):
                continue
            if self._triton and isinstance(work.encoding, Codes) and work.encoding.bits == 1:
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

    def by_parts(self, pieces: Pieces) -> bool:
        """Never: a launch for each part would cost more than it saves."""
        return False

    def ended(self, batches: Sequence[Waiting]) -> Ended:
        return self.sums().__getitem__

    def renewing(
        self, batches: Sequence[Waiting], renewal: Renewal, weights: Integers, scale: float
    ) -> list[Call]:
        return []

    def sums(self) -> Integers:
        sums: Integers = self._sums.cpu().numpy()
        return sums

    def take(self, sums: Integers) -> None:
        self._sums += torch.tensor(sums).to(self._device)

    def reset(self) -> None:
        self._sums.zero_()
