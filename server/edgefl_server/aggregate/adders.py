"""Choice of the compiled loop that adds a batch of updates, by the encoding of a section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import numpy.typing as npt

from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import widen
from edgefl.wire.update.form import CodeEncoding, FloatEncoding, SparseEncoding
from edgefl_server.aggregate.scatter import FIRST, LENGTH, Integers, SectionBlocks, TierBlocks

Factors = npt.NDArray[np.float64]

Loop = Callable[..., None]
"""Function that adds blocks to a :class:`edgefl_server.aggregate.blocks.Sink`, its argument."""

Chosen = Callable[[slice, Integers], Loop]
"""Function from blocks of a section to the loop that adds them. Arguments: the slice of the section's blocks, and the
blocks, whose targets may have been moved."""


@dataclass(frozen=True, eq=False)
class CheckedArrays:
    """Validated update that is still encoded.

    Nothing is copied, so the arrays must not change until they have been added.

    Attributes:
        pieces: Layout of the update.
        arrays: Encoded arrays in the order of ``pieces.sources``, in C order and aligned.
        largest: Upper bound on the magnitude of its floats.
    """

    pieces: TierBlocks
    arrays: tuple[Array, ...]
    largest: float = np.inf

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def named(self) -> dict[str, Array]:
        """Return the encoded arrays by name."""
        return dict(zip(self.pieces.sources, self.arrays, strict=True))

    @cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Return the memory addresses of the arrays, uint64 [arrays]."""
        return addresses_of(self.arrays)


def readable(array: Array) -> Array:
    """Return ``array`` in C order and aligned, as compiled loops require. It is copied only if necessary."""
    if isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, requirements=["C", "A"])  # a number that was an array without a dimension, too


def addresses_of(arrays: Sequence[Array]) -> npt.NDArray[np.uint64]:
    """Return the memory addresses of ``arrays``, uint64. The caller must keep the arrays alive."""
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.uint64)


@dataclass(frozen=True, eq=False)
class UpdateBatch:
    """Updates of one layout that are added together.

    Attributes:
        pieces: The layout.
        updates: The updates.
        factors: Factor of each update's values (weight times fixed-point scale), float64 [updates].
    """

    pieces: TierBlocks
    updates: Sequence[CheckedArrays]
    factors: Factors


def loop_of(batch: UpdateBatch, work: SectionBlocks) -> Chosen:
    """Return a function that prepares the compiled loop for the section ``work`` (tensors with one encoding) of the batch.

    The function takes a slice of the section's blocks and these blocks (int64 [n, 5]). It returns a second function, which
    takes a :class:`~edgefl_server.aggregate.blocks.Sink` and adds the values of all updates to its sums.
    """
    from edgefl_server.aggregate import code_kernels, kernels

    pieces, updates, factors = batch.pieces, batch.updates, batch.factors
    addresses = np.stack([update.addresses for update in updates])
    near = factors * [update.largest for update in updates] < kernels.NEAR
    match work.encoding:
        case CodeEncoding(bits=bits):
            values = code_values(pieces, work, updates, factors)
            return lambda _, blocks: partial(code_kernels.add_codes, addresses, bits, values, blocks)
        case FloatEncoding(dtype="float32"):
            return lambda _, blocks: partial(kernels.add_floats, addresses, factors, near, blocks)
        case FloatEncoding(dtype=dtype):
            wide = _widen_table(dtype)
            return lambda _, blocks: partial(kernels.add_halves, addresses, wide, factors, near, blocks)
        case SparseEncoding():
            source, starts = pieces.sources.index("values"), _starts(pieces, work, updates)
            return lambda chosen, blocks: partial(
                kernels.add_kept, addresses, source, starts[:, chosen].copy(), factors, blocks
            )


def code_values(
    pieces: TierBlocks, work: SectionBlocks, updates: Sequence[CheckedArrays], factors: Factors
) -> Integers:
    """Return the fixed-point integer that each code of section ``work`` adds, int64 [updates, rows, 2**bits].

    It is ``rint(float64(float32 scale * level) * factor)``.

    Args:
        pieces: Layout of the updates.
        work: Section whose encoding is :class:`CodeEncoding`. A row is one of its scales.
        updates: Checked updates.
        factors: Factor of each update, float64 [updates].
    """
    assert isinstance(work.encoding, CodeEncoding)
    levels = np.asarray(work.encoding.levels, np.float32)
    if work.encoding.scale is None:
        part, source = slice(work.scale, work.scale + work.rows), pieces.sources.index("scales")
        scales = np.stack([update.arrays[source][part] for update in updates])
    else:
        scales = np.full((len(updates), 1), work.encoding.scale, np.float32)
    values = (scales[:, :, None] * levels).astype(np.float64)
    values *= factors[:, None, None]
    return np.rint(values, out=values).astype(np.int64)


def _starts(pieces: TierBlocks, work: SectionBlocks, updates: Sequence[CheckedArrays]) -> Integers:
    """Return the position of each block's first value in the array ``values`` of an update, int64 [updates, blocks].

    ``work`` is a sparse section: a group of tensors of which only the entries in a mask are sent. The position is the
    section's first index plus the number of mask bits that are set before the block.
    """
    from edgefl_server.aggregate import scans

    source = pieces.sources.index("mask")
    counts = np.empty((len(updates), len(work.blocks)), np.int64)
    firsts, lengths = work.blocks[:, FIRST].copy(), work.blocks[:, LENGTH].copy()
    for update, row in zip(updates, counts, strict=True):
        scans.count_bits(update.addresses[source], firsts, lengths, row)
    return work.kept + np.cumsum(counts, axis=1) - counts


@cache
def _widen_table(dtype: str) -> npt.NDArray[np.float32]:
    """Return the float32 value of each 16-bit pattern of ``dtype`` (float16 or bfloat16), float32 [65536]."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        return widen(patterns if dtype == "bfloat16" else patterns.view(np.float16))
