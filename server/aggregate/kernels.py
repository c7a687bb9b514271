"""Compiled loops that add batches of packed updates into int64 sums.

All read an update's arrays through their addresses, ``addresses`` (uint64 [updates, arrays]), so a batch is never
copied together; whoever calls keeps the arrays alive and has checked their lengths. ``blocks``, ``index`` and
``size`` are those of :mod:`server.aggregate.scatter`; ``fresh`` sums hold nothing yet, whatever is there. Each block's
sum over the batch is built in the cache, so the sums in memory are read and written once per batch. The loops hold no
lock of Python's: several threads may run them on disjoint blocks. They are not numba's own parallel loops, whose thread
pool must not be used from several threads at once.

Everything that these loops are compiled with stands in this file (:mod:`server.aggregate.native` says why).
"""

from __future__ import annotations

import numpy as np

from server.aggregate.native import (
    Number,
    Numbers,
    bytes_at,
    compiled,
    floats_at,
    lowest_bit,
    shorts_at,
    words_at,
)

BLOCK = 4096
"""Most entries of a block: its sums and its clients' bits stay in the processor's cache. A multiple of 8."""

FIRST, LENGTH, SOURCE, ROW, TARGET = range(5)
"""Columns of a block: its first bit (codes, masks) or element (floats) in its array, entries, number of its array, row of
its scale, and first entry in the model; ``layout.size + i`` stands for the positions from ``index[i]`` on."""


@compiled
def _place(block: Numbers, size: Number, fresh: Number, sums: Numbers, scratch: Numbers) -> Numbers:
    """Where the block's sums go: its part of ``sums``, zeroed if that is ``fresh``, or zeroed scratch if its places are
    scattered."""
    at, count = block[TARGET], block[LENGTH]
    if at < size:
        out = sums[at : at + count]
        if fresh:
            out[:] = 0
        return out
    out = scratch[:count]
    out[:] = 0
    return out


@compiled
def _spread(out: Numbers, block: Numbers, index: Numbers, size: Number, sums: Numbers) -> None:
    """Add ``out`` to the places of ``block``, if it is scratch."""
    if block[TARGET] >= size:
        at = block[TARGET] - size
        places = index[at : at + out.shape[0]]
        for i in range(out.shape[0]):
            sums[places[i]] += out[i]


@compiled
def _few(addresses: Numbers, first: Number, source: Number, few: Numbers) -> None:
    """Fill ``few`` with the addresses of array ``source`` of the updates from ``first`` on, the last one repeated."""
    for k in range(few.shape[0]):
        few[k] = addresses[min(first + k, addresses.shape[0] - 1), source]


@compiled
def _fill_tables(low: Numbers, high: Numbers, row: Number, tables: Numbers) -> None:
    """``tables`` [groups, 256]: entry c sums over eight updates ``high`` where c's bit is set and ``low`` elsewhere."""
    updates = low.shape[0]
    for group in range(tables.shape[0]):
        first, table = 8 * group, tables[group]
        table[0] = low[first : first + 8, row].sum()
        for k in range(8):
            step = high[first + k, row] - low[first + k, row] if first + k < updates else 0
            for code in range(1 << k):
                table[code + (1 << k)] = table[code] + step


@compiled
def _swap(a: Number, b: Number, shift: Number, mask: Number) -> tuple[Number, Number]:
    """``a`` and ``b`` with the bits of ``a`` above ``shift`` exchanged for those of ``b`` that ``mask`` names."""
    moved = ((a >> np.uint64(shift)) ^ b) & np.uint64(mask)
    return a ^ (moved << np.uint64(shift)), b ^ moved


@compiled
def _transposed(
    a: Number, b: Number, c: Number, d: Number, e: Number, f: Number, g: Number, h: Number
) -> tuple[Number, ...]:
    """Words i of the result: byte j has in bit k the bit i of byte j of word k, for eight bytes at once."""
    a, e = _swap(a, e, 4, 0x0F0F0F0F0F0F0F0F)
    b, f = _swap(b, f, 4, 0x0F0F0F0F0F0F0F0F)
    c, g = _swap(c, g, 4, 0x0F0F0F0F0F0F0F0F)
    d, h = _swap(d, h, 4, 0x0F0F0F0F0F0F0F0F)
    a, c = _swap(a, c, 2, 0x3333333333333333)
    b, d = _swap(b, d, 2, 0x3333333333333333)
    e, g = _swap(e, g, 2, 0x3333333333333333)
    f, h = _swap(f, h, 2, 0x3333333333333333)
    a, b = _swap(a, b, 1, 0x5555555555555555)
    c, d = _swap(c, d, 1, 0x5555555555555555)
    e, f = _swap(e, f, 1, 0x5555555555555555)
    g, h = _swap(g, h, 1, 0x5555555555555555)
    return a, b, c, d, e, f, g, h


@compiled
def _last(address: Number, count: Number) -> Number:
    """The ``count`` bytes (at most 8) at ``address`` as a word; what lies behind is not read."""
    word, source = np.uint64(0), bytes_at(address)
    for j in range(count):
        word |= np.uint64(source[j]) << np.uint64(8 * j)
    return word


@compiled
def _turn(at: Numbers, count: Number, planes: Numbers) -> None:
    """``planes[i]``'s byte j: bit k is bit i of byte j at address ``at[k]``, of which there are eight.

    ``planes`` is uint64 [8, words].
    """
    a, b, c, d = words_at(at[0]), words_at(at[1]), words_at(at[2]), words_at(at[3])
    e, f, g, h = words_at(at[4]), words_at(at[5]), words_at(at[6]), words_at(at[7])
    p, q, r, s = planes[0], planes[1], planes[2], planes[3]
    t, u, v, w = planes[4], planes[5], planes[6], planes[7]
    words = count >> 3
    for j in range(words):
        plane_words = _transposed(a[j], b[j], c[j], d[j], e[j], f[j], g[j], h[j])
        p[j], q[j], r[j], s[j], t[j], u[j], v[j], w[j] = plane_words
    rest = count & 7
    if rest:
        k = at + np.uint64(8 * words)
        plane_words = _transposed(
            _last(k[0], rest), _last(k[1], rest), _last(k[2], rest), _last(k[3], rest),
            _last(k[4], rest), _last(k[5], rest), _last(k[6], rest), _last(k[7], rest),
        )  # fmt: skip
        p[words], q[words], r[words], s[words], t[words], u[words], v[words], w[words] = plane_words


@compiled
def add_bits(
    addresses: Numbers,
    low: Numbers,
    high: Numbers,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    fresh: Number,
    sums: Numbers,
) -> None:
    """One bit per entry: 0 adds ``low[k, row]`` and 1 ``high[k, row]`` (int64 [updates, rows]).

    The bits that eight updates have for an entry make one byte, which looks up their sum in a table of 256.
    """
    updates = addresses.shape[0]
    groups = -(-updates // 8)
    tables = np.zeros((-(-groups // 4) * 4, 256), np.int64)
    eight = np.zeros(8, np.uint64)
    planes = np.zeros((tables.shape[0], 8, BLOCK // 64 + 1), np.uint64)
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
            # The table does not look at the bits of updates that are repeated.
            _few(addresses, 8 * group, block[SOURCE], eight)
            _turn(eight + np.uint64(start), count, planes[group])
        out = _place(block, size, fresh, sums, scratch)
        for first in range(0, groups, 4):  # so many at a time: their sum stays in a register
            _look_up_bits(tables[first : first + 4], planes[first : first + 4], skip, out)
        _spread(out, block, index, size, sums)


@compiled
def _look_up_bits(tables: Numbers, planes: Numbers, skip: Number, out: Numbers) -> None:
    """Add to ``out`` what the codes of four groups find in their tables; entry i is bit ``skip + i`` of the block."""
    t0, t1, t2, t3 = tables[0], tables[1], tables[2], tables[3]
    words = 0 if skip else out.shape[0] >> 6
    low = np.uint64(255)
    for j in range(words):
        for bit in range(8):
            a, b, c, d = planes[0, bit, j], planes[1, bit, j], planes[2, bit, j], planes[3, bit, j]
            for byte in range(8):
                out[64 * j + 8 * byte + bit] += (t0[a & low] + t1[b & low]) + (t2[c & low] + t3[d & low])
                a, b, c, d = a >> np.uint64(8), b >> np.uint64(8), c >> np.uint64(8), d >> np.uint64(8)
    codes = planes.view(np.uint8)
    for i in range(64 * words, out.shape[0]):
        bit, byte = (skip + i) & 7, (skip + i) >> 3
        first = t0[codes[0, bit, byte]] + t1[codes[1, bit, byte]]
        out[i] += first + (t2[codes[2, bit, byte]] + t3[codes[3, bit, byte]])


@compiled
def _look_up(tables: Numbers, codes: Numbers, groups: Number, out: Numbers) -> None:
    """Add to ``out[i]`` what ``codes[g, i]`` finds in ``tables[g]``, for each group g; groups come in fours."""
    for first in range(0, groups, 4):
        t0, t1, t2, t3 = tables[first], tables[first + 1], tables[first + 2], tables[first + 3]
        b0, b1, b2, b3 = codes[first], codes[first + 1], codes[first + 2], codes[first + 3]
        if first + 1 == groups:
            for i in range(out.shape[0]):
                out[i] += t0[b0[i]]
        else:
            for i in range(out.shape[0]):
                out[i] += (t0[b0[i]] + t1[b1[i]]) + (t2[b2[i]] + t3[b3[i]])


@compiled
def _fill_pairs(values: Numbers, row: Number, bits: Number, tables: Numbers) -> None:
    """``tables`` [groups, 4**bits]: entry c + (d << bits) is what code c of one update and d of the next add."""
    updates, codes = values.shape[0], 1 << bits
    for group in range((updates + 1) >> 1):
        first = values[2 * group, row]
        for d in range(codes):
            more = values[2 * group + 1, row, d] if 2 * group + 1 < updates else 0
            for c in range(codes):
                tables[group, c + (d << bits)] = first[c] + more


@compiled
def add_codes(
    addresses: Numbers,
    bits: Number,
    values: Numbers,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    fresh: Number,
    sums: Numbers,
) -> None:
    """``bits`` (2 to 8) per entry: code c adds ``values[k, row, c]`` (int64 [updates, rows, 2**bits]).

    Up to four bits, the codes that two updates have for an entry make one, which looks up their sum.
    """
    updates, paired = addresses.shape[0], bits <= 4
    groups = (updates + 1) >> 1 if paired else updates
    tables = np.zeros((-(-groups // 4) * 4, 1 << (2 * bits if paired else bits)), np.int64)
    unpacked = np.zeros((tables.shape[0], BLOCK), np.uint8)
    other = np.zeros(BLOCK, np.uint8)
    scratch = np.zeros(BLOCK, np.int64)
    row = -1
    for b in range(blocks.shape[0]):
        block = blocks[b]
        first, count, source = block[FIRST], block[LENGTH], block[SOURCE]
        if block[ROW] != row:
            row = block[ROW]
            if paired:
                _fill_pairs(values, row, bits, tables)
            else:
                tables[:updates] = values[:, row]
        for group in range(groups):
            codes = unpacked[group, :count]
            if not paired:
                _unpack(bytes_at(addresses[group, source]), first, bits, codes)
                continue
            _unpack(bytes_at(addresses[2 * group, source]), first, bits, codes)
            if 2 * group + 1 < updates:
                _unpack(bytes_at(addresses[2 * group + 1, source]), first, bits, other[:count])
                for i in range(count):
                    codes[i] |= other[i] << np.uint8(bits)
        out = _place(block, size, fresh, sums, scratch)
        _look_up(tables, unpacked, groups, out)
        _spread(out, block, index, size, sums)


@compiled
def _unpack(codes: Numbers, first: Number, bits: Number, out: Numbers) -> None:
    """The codes from bit ``first`` on."""
    if bits == 8:
        start = first >> 3
        for i in range(out.shape[0]):
            out[i] = codes[start + i]
        return
    whole = 0
    if bits == 4 and not first & 7:
        start, whole = first >> 3, out.shape[0] & ~1
        for j in range(whole >> 1):
            byte = codes[start + j]
            out[2 * j], out[2 * j + 1] = byte & np.uint8(15), byte >> np.uint8(4)
    mask = (1 << bits) - 1
    for i in range(whole, out.shape[0]):
        at = first + i * bits
        word, shift = np.int64(codes[at >> 3]), at & 7
        if shift + bits > 8:  # else nothing may lie behind
            word |= np.int64(codes[(at >> 3) + 1]) << 8
        out[i] = (word >> shift) & mask


@compiled
def _fixed(value: Number, factor: Number) -> Number:
    return np.int64(np.rint(np.float64(value) * factor))


@compiled
def add_floats(
    addresses: Numbers,
    factors: Numbers,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    fresh: Number,
    sums: Numbers,
) -> None:
    """float32 entries: x adds rint(float64(x) * factors[k]). Four updates at a time share each visit to the sums."""
    scratch, four = np.zeros(BLOCK, np.int64), np.zeros(4, np.uint64)
    own = np.zeros(addresses.shape[0] + 3, np.float64)  # 0 for the updates that are repeated to make four
    own[: addresses.shape[0]] = factors
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = _place(block, size, fresh, sums, scratch)
        for k in range(0, addresses.shape[0], 4):
            _few(addresses, k, block[SOURCE], four)
            _add_four_floats(four, own[k : k + 4], block[FIRST], out)
        _spread(out, block, index, size, sums)


@compiled
def _add_four_floats(addresses: Numbers, factors: Numbers, first: Number, out: Numbers) -> None:
    skipped = np.uint64(4 * first)
    a, b = floats_at(addresses[0] + skipped), floats_at(addresses[1] + skipped)
    c, d = floats_at(addresses[2] + skipped), floats_at(addresses[3] + skipped)
    s, t, u, v = factors[0], factors[1], factors[2], factors[3]
    for i in range(out.shape[0]):
        out[i] += (_fixed(a[i], s) + _fixed(b[i], t)) + (_fixed(c[i], u) + _fixed(d[i], v))


@compiled
def add_halves(
    addresses: Numbers,
    widened: Numbers,
    factors: Numbers,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    fresh: Number,
    sums: Numbers,
) -> None:
    """16 bits per entry, whose value is ``widened`` (float32 [65536]), added as floats are."""
    scratch, wide = np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.float32)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = _place(block, size, fresh, sums, scratch)
        for k in range(addresses.shape[0]):
            halves = shorts_at(addresses[k, block[SOURCE]] + np.uint64(2 * block[FIRST]))
            for i in range(out.shape[0]):
                wide[i] = widened[halves[i]]
            factor = factors[k]
            for i in range(out.shape[0]):
                out[i] += _fixed(wide[i], factor)
        _spread(out, block, index, size, sums)


@compiled
def add_kept(
    addresses: Numbers,
    source: Number,
    starts: Numbers,
    factors: Numbers,
    blocks: Numbers,
    index: Numbers,
    size: Number,
    fresh: Number,
    sums: Numbers,
) -> None:
    """A mask's bit per entry: where it is 1, the next value of array ``source`` is added as a float, else nothing.

    ``starts`` (int64 [updates, blocks]) is the place in ``source`` of each block's first value.
    """
    scratch = np.zeros(BLOCK, np.int64)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        out = _place(block, size, fresh, sums, scratch)
        for k in range(addresses.shape[0]):
            mask = addresses[k, block[SOURCE]]
            values = floats_at(addresses[k, source] + np.uint64(4 * starts[k, b]))
            _add_kept_of(mask, block[FIRST], values, factors[k], out)
        _spread(out, block, index, size, sums)


@compiled
def _add_kept_of(mask: Number, first: Number, values: Numbers, factor: Number, out: Numbers) -> None:
    """Entry i has bit ``first + i`` of the mask at this address. Bits are read by words as far as these go."""
    skip, count = first & 7, out.shape[0]
    address = mask + np.uint64(first >> 3)
    words, last, at = words_at(address), (skip + count) >> 6, 0
    for j in range(last + 1):
        if j < last:
            left = words[j]
        else:
            bits = (skip + count) & 63
            left = _last(address + np.uint64(8 * j), (bits + 7) >> 3) & (
                (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
            )
        if j == 0:
            left &= ~((np.uint64(1) << np.uint64(skip)) - np.uint64(1))
        start = 64 * j - skip
        while left:
            out[start + np.int64(lowest_bit(left))] += _fixed(values[at], factor)
            left &= left - np.uint64(1)
            at += 1


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
    """One update's float32 entries and its ``weight``, where they differ from ``base`` (float32, the flat model)."""
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
    """Add ``weight`` to every entry that the blocks cover."""
    for b in range(blocks.shape[0]):
        block = blocks[b]
        at, count = block[TARGET], block[LENGTH]
        if at < size:
            weights[at : at + count] += weight
        else:
            for i in range(count):
                weights[index[at - size + i]] += weight
