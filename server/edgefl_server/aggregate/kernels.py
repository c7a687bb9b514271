"""Compiled loops that add batches of updates in floats into int64 sums. Codes are added by
:mod:`edgefl_server.aggregate.code_kernels`.

All loops read an update's arrays through their addresses, ``addresses`` (uint64 [updates, arrays]), so a batch is
never copied together. The caller keeps the arrays alive and has checked their lengths. ``blocks``, ``index`` and
``size`` are defined in :mod:`edgefl_server.aggregate.scatter`, ``sink`` in :mod:`edgefl_server.aggregate.blocks`.
Each block's sum over the batch is built in the cache, so the sums in memory are read and written once per batch. The
loops run without the GIL, so several threads may run them on disjoint blocks. They do not use numba's parallel loops,
whose thread pool must not be used from several threads at once.

All code that is compiled into these loops is in this file and in three shared files
(:mod:`edgefl_server.aggregate.native` explains why).

``near`` (bool [updates]) is True if no value of an update times its factor reaches :data:`NEAR`. Then a sum with
``1.5 * 2**52`` has the rounded integer in its lowest bits, which is faster than a conversion and rounds alike.
"""

from __future__ import annotations

import numpy as np

from edgefl_server.aggregate.blocks import Sink, fill_addresses, is_undefined, last_word, place, store_sums
from edgefl_server.aggregate.native import (
    Number,
    Numbers,
    bits_of,
    compiled,
    floats_at,
    lowest_bit,
    set_bits,
    shorts_at,
    words_at,
)
from edgefl_server.aggregate.scatter import BLOCK, FIRST, LENGTH, SOURCE, TARGET

NEAR = 2.0**51
"""Below it, a number plus ``_SHIFT`` has one for the value of its lowest bit, and the same exponent."""

_SHIFT = 1.5 * 2.0**52
_SHIFT_BITS = 0x4338000000000000
"""The bits of ``_SHIFT``: to be taken off."""

_TOGETHER = 4
"""Updates that share a visit to the sums."""

_AHEAD = 4
"""Places of a mask's word that are noted whether it has so many or not: asking each time costs more."""

_TOP = np.uint64(1 << 63)
"""Stands where no bit is left, whose lowest is not to be asked for."""


@compiled
def _fixed(value: Number, factor: Number) -> Number:
    return np.int64(np.rint(np.float64(value) * factor))


@compiled
def _shifted(value: Number, factor: Number) -> Number:
    """Return ``rint(value * factor) + _SHIFT_BITS`` as int64. The product must be below :data:`NEAR`."""
    return bits_of(np.float64(value) * factor + _SHIFT)


@compiled
def add_floats(addresses: Numbers, factors: Numbers, near: Numbers, blocks: Numbers, sink: Sink) -> None:
    """Add float32 entries of a batch: entry x of update k adds ``rint(float64(x) * factors[k])``.

    Args:
        addresses: Memory address of each array of each update, uint64 [updates, arrays].
        factors: Fixed-point factor of each update, float64 [updates].
        near: True for updates whose products all stay below :data:`NEAR`, bool [updates]; they are added faster.
        blocks: Stretches of entries to add, int64 [blocks, 5] (:mod:`edgefl_server.aggregate.scatter`).
        sink: Output, whose sums or new model are changed.
    """
    scratch, own = np.zeros(BLOCK, np.int64), np.zeros(_TOGETHER, np.uint64)
    updates = addresses.shape[0]
    by = np.zeros(updates + _TOGETHER - 1, np.float64)  # 0 for the updates that are repeated to make four
    by[:updates] = factors
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = place(block, sink, scratch)
        fill = is_undefined(block, sink)
        for k in range(0, updates, _TOGETHER):
            fill_addresses(addresses, k, block[SOURCE], 4 * block[FIRST], own)
            keep = np.int64(0 if fill and k == 0 else -1)
            if near[k : k + _TOGETHER].all():
                _add_four_near(own, by[k : k + _TOGETHER], keep, out)
            else:
                _add_four(own, by[k : k + _TOGETHER], keep, out)
        store_sums(out, block, sink)


@compiled
def _add_four_near(at: Numbers, factors: Numbers, keep: Number, out: Numbers) -> None:
    a, b, c, d = floats_at(at[0]), floats_at(at[1]), floats_at(at[2]), floats_at(at[3])
    s, t, u, v = factors[0], factors[1], factors[2], factors[3]
    more = np.int64(4) * np.int64(_SHIFT_BITS)
    for i in range(out.shape[0]):
        added = (_shifted(a[i], s) + _shifted(b[i], t)) + (_shifted(c[i], u) + _shifted(d[i], v))
        out[i] = (out[i] & keep) + (added - more)


@compiled
def _add_four(at: Numbers, factors: Numbers, keep: Number, out: Numbers) -> None:
    a, b, c, d = floats_at(at[0]), floats_at(at[1]), floats_at(at[2]), floats_at(at[3])
    s, t, u, v = factors[0], factors[1], factors[2], factors[3]
    for i in range(out.shape[0]):
        added = (_fixed(a[i], s) + _fixed(b[i], t)) + (_fixed(c[i], u) + _fixed(d[i], v))
        out[i] = (out[i] & keep) + added


@compiled
def add_halves(
    addresses: Numbers, widened: Numbers, factors: Numbers, near: Numbers, blocks: Numbers, sink: Sink
) -> None:
    """Add entries of a batch in 16-bit floats. Arguments are as in :func:`add_floats`, except ``widened``.

    ``widened``, float32 [65536], maps each bit pattern (float16 or bfloat16) to its value.
    """
    scratch, wide = np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.float32)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = place(block, sink, scratch)
        fill = is_undefined(block, sink)
        for k in range(addresses.shape[0]):
            halves = shorts_at(addresses[k, block[SOURCE]] + np.uint64(2 * block[FIRST]))
            for i in range(out.shape[0]):
                wide[i] = widened[halves[i]]
            factor, keep = factors[k], np.int64(0 if fill and k == 0 else -1)
            if near[k]:
                for i in range(out.shape[0]):
                    out[i] = (out[i] & keep) + (_shifted(wide[i], factor) - np.int64(_SHIFT_BITS))
            else:
                for i in range(out.shape[0]):
                    out[i] = (out[i] & keep) + _fixed(wide[i], factor)
        store_sums(out, block, sink)


@compiled
def add_kept(
    addresses: Numbers, source: Number, starts: Numbers, factors: Numbers, blocks: Numbers, sink: Sink
) -> None:
    """Add masked float32 entries of a batch: an entry whose mask bit is 1 adds the next stored value, any other
    nothing.

    Args:
        addresses: Memory address of each array of each update, uint64 [updates, arrays].
        source: Index of the array of stored values. The blocks name the array of the mask.
        starts: Index in the stored values of each block's first value, int64 [updates, blocks].
        factors: Fixed-point factor of each update, float64 [updates].
        blocks: Stretches of entries to add, int64 [blocks, 5] (:mod:`edgefl_server.aggregate.scatter`).
        sink: Output, whose sums or new model are changed.
    """
    scratch, places = np.zeros(BLOCK, np.int64), np.zeros(BLOCK + _AHEAD, np.int16)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = place(block, sink, scratch)
        if is_undefined(block, sink):
            out[:] = 0
        for k in range(addresses.shape[0]):
            count = _places(addresses[k, block[SOURCE]], block[FIRST], out.shape[0], places)
            values, factor = floats_at(addresses[k, source] + np.uint64(4 * starts[k, b])), factors[k]
            for i in range(count):
                out[places[i]] += _fixed(values[i], factor)
        store_sums(out, block, sink)


@compiled
def _places(mask: Number, first: Number, count: Number, places: Numbers) -> Number:
    """Return the number of set bits among ``count`` bits from bit ``first`` on of the mask at address ``mask``.

    Their positions, counted from 0, are written to ``places``. The bits are read as 64-bit words.
    """
    skip, found = first & 7, 0
    address = mask + np.uint64(first >> 3)
    words, last = words_at(address), (skip + count) >> 6
    for j in range(last + 1):
        if j < last:
            left = words[j]
        else:
            bits = (skip + count) & 63
            left = last_word(address + np.uint64(8 * j), (bits + 7) >> 3) & (
                (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
            )
        if j == 0:
            left &= ~((np.uint64(1) << np.uint64(skip)) - np.uint64(1))
        start, ones, at = 64 * j - skip, int(set_bits(left)), found
        for k in range(_AHEAD):
            places[at + k] = start + np.int64(lowest_bit(left | _TOP))
            left &= left - np.uint64(1)
        at += _AHEAD
        while left:
            places[at] = start + np.int64(lowest_bit(left))
            left &= left - np.uint64(1)
            at += 1
        found += ones
    return found


@compiled
def add_changed(
    addresses: Numbers,
    factor: Number,
    base: Numbers,
    weight: Number,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    sums: Numbers,
    weights: Numbers,
) -> None:
    """Add the float32 entries of one update that differ from ``base``, and count its weight there.

    Args:
        addresses: Memory address of each array of the update, uint64 [1, arrays].
        factor: Fixed-point factor of the update.
        base: Flat model, float32 [size].
        weight: Weight of the update.
        blocks: Blocks of the update, int64 [blocks, 5] (:mod:`edgefl_server.aggregate.scatter`).
        index: Model positions of scattered entries, int64.
        size: Entries of the model.
        sums: Fixed-point sums, int64 [size], changed in place.
        weights: Total weight of each entry, int64 [size], changed in place.
    """
    for b in range(blocks.shape[0]):
        block = blocks[b]
        values = floats_at(addresses[0, block[SOURCE]])
        for i in range(block[LENGTH]):
            at = block[TARGET] + i
            if at >= size:
                at = index[at - size]
            value = values[block[FIRST] + i]
            if value != base[at]:
                sums[at] += _fixed(value, factor)
                weights[at] += weight


@compiled
def add_weight(weight: Number, blocks: Numbers, index: Numbers, size: Number, weights: Numbers) -> None:
    """Add ``weight`` to the elements of ``weights`` (int64 [size], the flat model) that the update holds.

    ``blocks``, int64 [blocks, 5], are its stretches of entries, and ``index`` the model positions of scattered entries
    (:mod:`edgefl_server.aggregate.scatter`).
    """
    for b in range(blocks.shape[0]):
        block = blocks[b]
        at, count = block[TARGET], block[LENGTH]
        if at < size:
            weights[at : at + count] += weight
        else:
            for i in range(count):
                weights[index[at - size + i]] += weight
