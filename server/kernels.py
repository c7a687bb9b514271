"""Compiled loops that add batches of packed updates into int64 sums.

All read an update's arrays through their addresses, ``addresses`` (uint64 [updates, arrays]), so a batch is never copied
together; whoever calls keeps the arrays alive and has checked their lengths. ``blocks``, ``index`` and ``size`` are those
of :mod:`server.pieces`. Each block's sum over the batch is built in the cache, so the sums in memory are read and written
once per batch. The loops hold no lock of Python's: several threads may run them on disjoint
blocks. They are not numba's own parallel loops, whose thread pool must not be used from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from server.pieces import BLOCK, FIRST, LENGTH, ROW, SOURCE, TARGET

_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(function: _F) -> _F:
    """Compiled at first use and kept on disk; where no folder can be written, compiled anew in each process."""
    try:
        return cast(_F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "cannot cache function: no locator available"
        return cast(_F, njit(nogil=True)(function))


def _pointer(element: Any) -> Any:
    """A function that compiled code calls to see an address (uint64) as an array of ``element``."""

    @intrinsic  # type: ignore[untyped-decorator]
    def at(typing_context: Any, address: Any) -> Any:
        pointer = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.uint64), generate

    return at


_bytes_at = _pointer(types.uint8)
_shorts_at = _pointer(types.uint16)
_floats_at = _pointer(types.float32)


@_compiled
def _place(block, size, sums, scratch):  # type: ignore[no-untyped-def]
    """Where the block's sums go: its part of ``sums``, or zeroed scratch if its places are scattered."""
    at, count = block[TARGET], block[LENGTH]
    if at < size:
        return sums[at : at + count]
    out = scratch[:count]
    out[:] = 0
    return out


@_compiled
def _spread(out, block, index, size, sums):  # type: ignore[no-untyped-def]
    """Add ``out`` to the places of ``block``, if it is scratch."""
    if block[TARGET] >= size:
        at = block[TARGET] - size
        places = index[at : at + out.shape[0]]
        for i in range(out.shape[0]):
            sums[places[i]] += out[i]


@_compiled
def _few(addresses, first, source, few):  # type: ignore[no-untyped-def]
    """Fill ``few`` with the addresses of array ``source`` of the updates from ``first`` on, the last one repeated."""
    for k in range(few.shape[0]):
        few[k] = addresses[min(first + k, addresses.shape[0] - 1), source]


@_compiled
def _fill_tables(low, high, row, tables):  # type: ignore[no-untyped-def]
    """``tables`` [groups, 256]: entry c sums over eight updates ``high`` where c's bit is set and ``low`` elsewhere."""
    updates = low.shape[0]
    for group in range(tables.shape[0]):
        first, table = 8 * group, tables[group]
        table[0] = low[first : first + 8, row].sum()
        for k in range(8):
            step = high[first + k, row] - low[first + k, row] if first + k < updates else 0
            for code in range(1 << k):
                table[code + (1 << k)] = table[code] + step


@_compiled
def _turn(addresses, start, words):  # type: ignore[no-untyped-def]
    """``words[j]``'s byte i: bit k is bit i of byte ``start + j`` at ``addresses[k]``, of which there are eight.

    The 8 x 8 bits of a word are transposed in three swaps.
    """
    a, b = _bytes_at(addresses[0] + start), _bytes_at(addresses[1] + start)
    c, d = _bytes_at(addresses[2] + start), _bytes_at(addresses[3] + start)
    e, f = _bytes_at(addresses[4] + start), _bytes_at(addresses[5] + start)
    g, h = _bytes_at(addresses[6] + start), _bytes_at(addresses[7] + start)
    for j in range(words.shape[0]):
        word = np.uint64(a[j]) | np.uint64(b[j]) << np.uint64(8)
        word |= np.uint64(c[j]) << np.uint64(16) | np.uint64(d[j]) << np.uint64(24)
        word |= np.uint64(e[j]) << np.uint64(32) | np.uint64(f[j]) << np.uint64(40)
        word |= np.uint64(g[j]) << np.uint64(48) | np.uint64(h[j]) << np.uint64(56)
        swap = (word ^ (word >> np.uint64(7))) & np.uint64(0x00AA00AA00AA00AA)
        word ^= swap ^ (swap << np.uint64(7))
        swap = (word ^ (word >> np.uint64(14))) & np.uint64(0x0000CCCC0000CCCC)
        word ^= swap ^ (swap << np.uint64(14))
        swap = (word ^ (word >> np.uint64(28))) & np.uint64(0x00000000F0F0F0F0)
        words[j] = word ^ swap ^ (swap << np.uint64(28))


@_compiled
def add_bits(addresses, low, high, blocks, index, size, sums):  # type: ignore[no-untyped-def]
    """One bit per entry: 0 adds ``low[k, row]`` and 1 ``high[k, row]`` (int64 [updates, rows]).

    The bits that eight updates have for an entry make one byte, which looks up their sum in a table of 256.
    """
    updates = addresses.shape[0]
    groups = -(-updates // 8)
    tables = np.zeros((-(-groups // 4) * 4, 256), np.int64)
    eight = np.zeros(8, np.uint64)
    words = np.zeros((tables.shape[0], BLOCK // 8 + 1), np.uint64)
    scratch = np.zeros(BLOCK, np.int64)
    row = -1
    for b in range(blocks.shape[0]):
        block = blocks[b]
        if block[ROW] != row:
            row = block[ROW]
            _fill_tables(low, high, row, tables[:groups])
        skip = block[FIRST] & 7
        start, count = block[FIRST] >> 3, (skip + block[LENGTH] + 7) >> 3
        for group in range(groups):
            _few(
                addresses, 8 * group, block[SOURCE], eight
            )  # the table does not look at the bits of repeated ones
            _turn(eight, np.uint64(start), words[group, :count])
        out = _place(block, size, sums, scratch)
        _look_up(tables, words.view(np.uint8), groups, skip, out)
        _spread(out, block, index, size, sums)


@_compiled
def _look_up(tables, codes, groups, skip, out):  # type: ignore[no-untyped-def]
    """Add to ``out[i]`` what ``codes[g, skip + i]`` finds in ``tables[g]``, for each group g."""
    for first in range(0, groups, 4):  # so many at a time: their sum stays in a register
        t0, t1, t2, t3 = tables[first], tables[first + 1], tables[first + 2], tables[first + 3]
        b0, b1, b2, b3 = (
            codes[first, skip:],
            codes[first + 1, skip:],
            codes[first + 2, skip:],
            codes[first + 3, skip:],
        )
        if first + 1 == groups:
            for i in range(out.shape[0]):
                out[i] += t0[b0[i]]
        else:
            for i in range(out.shape[0]):
                out[i] += (t0[b0[i]] + t1[b1[i]]) + (t2[b2[i]] + t3[b3[i]])


@_compiled
def add_codes(addresses, bits, values, blocks, index, size, sums):  # type: ignore[no-untyped-def]
    """``bits`` (2 to 8) per entry: code c adds ``values[k, row, c]`` (int64 [updates, rows, 2**bits])."""
    updates = addresses.shape[0]
    tables = np.zeros((-(-updates // 4) * 4, 1 << bits), np.int64)
    unpacked = np.zeros((tables.shape[0], BLOCK), np.uint8)
    scratch = np.zeros(BLOCK, np.int64)
    row = -1
    for b in range(blocks.shape[0]):
        block = blocks[b]
        if block[ROW] != row:
            row = block[ROW]
            tables[:updates] = values[:, row]
        for k in range(updates):
            codes = _bytes_at(addresses[k, block[SOURCE]])
            _unpack(codes, block[FIRST], bits, unpacked[k, : block[LENGTH]])
        out = _place(block, size, sums, scratch)
        _look_up(tables, unpacked, updates, 0, out)
        _spread(out, block, index, size, sums)


@_compiled
def _unpack(codes, first, bits, out):  # type: ignore[no-untyped-def]
    """The codes from bit ``first`` on."""
    if bits == 8:
        start = first >> 3
        for i in range(out.shape[0]):
            out[i] = codes[start + i]
        return
    mask = (1 << bits) - 1
    for i in range(out.shape[0]):
        at = first + i * bits
        word, shift = np.int64(codes[at >> 3]), at & 7
        if shift + bits > 8:  # else nothing may lie behind
            word |= np.int64(codes[(at >> 3) + 1]) << 8
        out[i] = (word >> shift) & mask


@_compiled
def _fixed(value, factor):  # type: ignore[no-untyped-def]
    return np.int64(np.rint(np.float64(value) * factor))


@_compiled
def add_floats(addresses, factors, blocks, index, size, sums):  # type: ignore[no-untyped-def]
    """float32 entries: x adds rint(float64(x) * factors[k]). Four updates at a time share each visit to the sums."""
    scratch, four = np.zeros(BLOCK, np.int64), np.zeros(4, np.uint64)
    own = np.zeros(addresses.shape[0] + 3, np.float64)  # 0 for the updates that are repeated to make four
    own[: addresses.shape[0]] = factors
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = _place(block, size, sums, scratch)
        for k in range(0, addresses.shape[0], 4):
            _few(addresses, k, block[SOURCE], four)
            _add_four_floats(four, own[k : k + 4], block[FIRST], out)
        _spread(out, block, index, size, sums)


@_compiled
def _add_four_floats(addresses, factors, first, out):  # type: ignore[no-untyped-def]
    skipped = np.uint64(4 * first)
    a, b = _floats_at(addresses[0] + skipped), _floats_at(addresses[1] + skipped)
    c, d = _floats_at(addresses[2] + skipped), _floats_at(addresses[3] + skipped)
    s, t, u, v = factors[0], factors[1], factors[2], factors[3]
    for i in range(out.shape[0]):
        out[i] += (_fixed(a[i], s) + _fixed(b[i], t)) + (_fixed(c[i], u) + _fixed(d[i], v))


@_compiled
def add_halves(addresses, widened, factors, blocks, index, size, sums):  # type: ignore[no-untyped-def]
    """16 bits per entry, whose value is ``widened`` (float32 [65536]), added as floats are."""
    scratch, wide = np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.float32)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = _place(block, size, sums, scratch)
        for k in range(addresses.shape[0]):
            halves = _shorts_at(addresses[k, block[SOURCE]] + np.uint64(2 * block[FIRST]))
            for i in range(out.shape[0]):
                wide[i] = widened[halves[i]]
            factor = factors[k]
            for i in range(out.shape[0]):
                out[i] += _fixed(wide[i], factor)
        _spread(out, block, index, size, sums)


@_compiled
def add_kept(addresses, source, starts, factors, blocks, index, size, sums):  # type: ignore[no-untyped-def]
    """A mask's bit per entry: where it is 1, the next value of array ``source`` is added as a float, else nothing.

    ``starts`` (int64 [updates, blocks]) is the place in ``source`` of each block's first value.
    """
    scratch = np.zeros(BLOCK, np.int64)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        first, stop = block[FIRST], block[FIRST] + block[LENGTH]
        out = _place(block, size, sums, scratch)
        for k in range(addresses.shape[0]):
            mask = _bytes_at(addresses[k, block[SOURCE]])
            values = _floats_at(addresses[k, source])
            at = starts[k, b]
            for byte in range(first >> 3, (stop + 7) >> 3):
                left = np.int64(mask[byte])
                for bit in range(max(first, 8 * byte), min(stop, 8 * byte + 8)) if left else range(0):
                    if left >> (bit & 7) & 1:
                        out[bit - first] += _fixed(values[at], factors[k])
                        at += 1
        _spread(out, block, index, size, sums)


@_compiled
def _ones(byte):  # type: ignore[no-untyped-def]
    """How many bits of a byte are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@_compiled
def count_bits(address, firsts, lengths, counts):  # type: ignore[no-untyped-def]
    """``counts[b]``: how many of the ``lengths[b]`` bits from bit ``firsts[b]`` on are set."""
    for b in range(firsts.shape[0]):
        first, stop = firsts[b], firsts[b] + lengths[b]
        mask = _bytes_at(address)
        found = 0
        for byte in range(first >> 3, (stop + 7) >> 3):
            found += np.int64(_ones(mask[byte]))
        if first & 7 and stop > first:
            found -= np.int64(_ones(mask[first >> 3] & ((1 << (first & 7)) - 1)))
        if stop & 7 and stop > first:
            found -= np.int64(_ones(mask[stop >> 3] >> (stop & 7)))
        counts[b] = found


@_compiled
def within(address, count, limit):  # type: ignore[no-untyped-def]
    """Whether ``count`` float32 lie in -limit..limit; NaN does not."""
    values = _floats_at(address)
    beyond = 0
    for i in range(count):
        beyond |= np.int64(not abs(values[i]) <= limit)
    return beyond == 0


@_compiled
def halves_within(address, count, most):  # type: ignore[no-untyped-def]
    """Whether the 15 bits below the sign of ``count`` patterns of 16 bits are all at most ``most``."""
    halves = _shorts_at(address)
    beyond = 0
    for i in range(count):
        beyond |= np.int64((halves[i] & 0x7FFF) > most)
    return beyond == 0


@_compiled
def add_changed(addresses, factor, base, weight, blocks, index, size, sums, weights):  # type: ignore[no-untyped-def]
    """One update's float32 entries and its ``weight``, where they differ from ``base`` (float32, the flat model)."""
    for b in range(blocks.shape[0]):
        block = blocks[b]
        values = _floats_at(addresses[0, block[SOURCE]])
        for i in range(block[LENGTH]):
            at = block[TARGET] + i
            if at >= size:
                at = index[at - size]
            value = values[block[FIRST] + i]
            if value != base[at]:
                sums[at] += _fixed(value, factor)
                weights[at] += weight


@_compiled
def add_weight(weight, blocks, index, size, weights):  # type: ignore[no-untyped-def]
    """Add ``weight`` to every entry that the blocks cover."""
    for b in range(blocks.shape[0]):
        block = blocks[b]
        at, count = block[TARGET], block[LENGTH]
        if at < size:
            weights[at : at + count] += weight
        else:
            for i in range(count):
                weights[index[at - size + i]] += weight


@_compiled
def mean(sums, weights, unit, old, change, new):  # type: ignore[no-untyped-def]
    """``new``: sum / (weight * unit), with ``change`` added to ``old``; the bits of ``old`` where nothing weighs.

    ``weights`` has one number per entry, or a single one for all.
    """
    single = weights.shape[0] == 1
    for i in range(sums.shape[0]):
        weight = weights[0] if single else weights[i]
        value = np.float64(sums[i]) / (np.float64(max(weight, 1)) * unit)
        if change:
            value += np.float64(old[i])
        new[i] = value if weight > 0 else old[i]
