"""Compiled loop that adds batches of updates in codes of 1 to 8 bits. It follows the rules of
:mod:`edgefl_server.aggregate.kernels`.

A *group* of updates contributes one byte for each entry: eight codes of one bit, four of two, two of three or four,
or one of more. The byte is the index into a table of 256 sums. So an entry costs one look-up for each group, whatever
the values of the codes. Bytes are formed from bits by exchanging fields of words between updates, eight bytes at a
time and as many words as the processor's registers hold. If the bits do not divide eight, codes are unpacked one by
one.
"""

from __future__ import annotations

import numpy as np

from edgefl_server.aggregate.blocks import Sink, fill_addresses, is_undefined, last_word, place, store_sums
from edgefl_server.aggregate.native import Number, Numbers, compiled, longs_at, prefetch, words_at
from edgefl_server.aggregate.scatter import BLOCK, FIRST, LENGTH, ROW, SOURCE

_LINE = 64
"""Bytes that come from memory together."""

_TABLE = 256
"""Sums of a group's table."""

_TOGETHER = 4
"""Groups that look up in one pass over the sums: their bytes stay in registers."""


@compiled
def add_codes(addresses: Numbers, bits: Number, values: Numbers, blocks: Numbers, sink: Sink) -> None:
    """Add a batch of updates that are encoded in codes of ``bits`` bits per entry.

    Args:
        addresses: Memory address of each array of each update, uint64 [updates, arrays].
        bits: Bits of a code, 1 to 8.
        values: Number that each code adds, int64 [updates, rows, 2**bits]; a row is a scale of the section.
        blocks: Stretches of entries to add, int64 [blocks, 5] (:mod:`edgefl_server.aggregate.scatter`).
        sink: Output, whose sums or new model are changed.
    """
    group_size = 8 // bits
    turned = 8 % bits == 0
    groups = -(-addresses.shape[0] // group_size)
    tables = np.zeros((-(-groups // _TOGETHER) * _TOGETHER, _TABLE), np.int64)
    count = group_size if turned else 1
    planes = np.zeros((_TOGETHER, count, BLOCK // (8 * count) + 2), np.uint64)
    own, scratch = np.zeros(group_size, np.uint64), np.zeros(BLOCK, np.int64)
    ahead = np.zeros(addresses.shape[0] * (BLOCK * bits // (8 * _LINE)), np.uint64)
    passes = -(-groups // _TOGETHER)
    row = -1
    for b in range(blocks.shape[0]):
        block = blocks[b]
        if block[ROW] != row:
            row = block[ROW]
            _fill(values, row, bits, tables[:groups])
        out = place(block, sink, scratch)
        skip = (block[FIRST] & 7) // bits if turned else 0
        fill = is_undefined(block, sink)
        lines = _list_lines(addresses, blocks[b + 1], bits, ahead) if b + 1 < blocks.shape[0] else 0
        for first in range(0, groups, _TOGETHER):
            for group in range(first, min(first + _TOGETHER, groups)):
                fill_addresses(addresses, group * group_size, block[SOURCE], block[FIRST] >> 3, own)
                if turned:
                    _transpose_codes(own, skip + out.shape[0], bits, planes[group - first])
                else:
                    _unpack(own, block[FIRST] & 7, out.shape[0], bits, planes[group - first, 0])
            done = first // _TOGETHER
            asked = ahead[lines * done // passes : lines * (done + 1) // passes]
            _look_up(tables[first : first + _TOGETHER], planes, skip, fill and first == 0, asked, out)
        store_sums(out, block, sink)


@compiled
def _list_lines(addresses: Numbers, block: Numbers, bits: Number, lines: Numbers) -> Number:
    """Write the addresses of the cache lines that hold the codes of ``block`` to ``lines``, and return their number.

    The caller prefetches them, because processors do not predict one memory stretch for each update.
    """
    found, own = words_at(np.uint64(lines.ctypes.data)), -(-bits * block[LENGTH] // (8 * _LINE))
    for k in range(addresses.shape[0]):
        start = addresses[k, block[SOURCE]] + np.uint64(block[FIRST] >> 3)
        for j in range(own):
            found[k * own + j] = start + np.uint64(_LINE * j)
    return own * addresses.shape[0]


@compiled
def _fill(values: Numbers, row: Number, bits: Number, tables: Numbers) -> None:
    """Fill ``tables``, int64 [groups, 256]: entry b is the sum of what the codes in byte b add, for scale row ``row``.

    The code of the group's update k is in the bits of b from ``bits * k`` on. ``values`` is as in :func:`add_codes`.
    Updates beyond the last one add 0.
    """
    group_size = 8 // bits
    for group in range(tables.shape[0]):
        table = tables[group]
        table[0] = 0
        for k in range(group_size):
            update, shift = group * group_size + k, bits * k
            for code in range((1 << bits) - 1, -1, -1):
                more = values[update, row, code] if update < values.shape[0] else 0
                for before in range(1 << shift):
                    table[before + (code << shift)] = table[before] + more


@compiled
def _transpose_codes(at: Numbers, codes: Number, bits: Number, planes: Numbers) -> None:
    """Rearrange the codes of a group of ``8 // bits`` updates so that one byte holds one code of each update.

    Afterwards the bits of byte j of ``planes[p]`` from ``bits * k`` on are code ``j * len(planes) + p`` of update k.
    Fields of words are exchanged between updates: half a byte wide, then a quarter, then an eighth.

    Args:
        at: Address of the first code of each update, uint64 [8 // bits].
        codes: Number of codes of each update.
        bits: Bits of a code: 1, 2, 4 or 8.
        planes: Output, uint64 [8 // bits, words].
    """
    count = (bits * codes + 7) >> 3
    words, rest = count >> 3, count & 7
    plane, length = np.uint64(planes.ctypes.data), np.uint64(8 * planes.shape[1])
    if bits == 8:
        _read(at[0], words, rest, words_at(plane))
        return
    shift, mask = np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F)
    apart = 4 // bits
    for k in range(apart):
        a, b = plane + np.uint64(k) * length, plane + np.uint64(k + apart) * length
        _read_both(at[k], at[k + apart], words, rest, words_at(a), words_at(b))
    while apart > 1:
        apart >>= 1
        shift >>= np.uint64(1)
        mask ^= mask << shift
        for k in range(planes.shape[0]):
            if not k & apart:
                a, b = plane + np.uint64(k) * length, plane + np.uint64(k + apart) * length
                _swap(words_at(a), words_at(b), shift, mask, 0, words + min(rest, 1))


@compiled
def _read(address: Number, words: Number, rest: Number, plane: Numbers) -> None:
    """Copy ``words`` 64-bit words from ``address`` to ``plane``, then ``rest`` (0 to 7) bytes as one more word."""
    source = words_at(address)
    for j in range(words):
        plane[j] = source[j]
    if rest:
        plane[words] = last_word(address + np.uint64(8 * words), rest)


@compiled
def _read_both(first: Number, second: Number, words: Number, rest: Number, a: Numbers, b: Numbers) -> None:
    """Read ``words`` words and ``rest`` more bytes from two addresses into planes ``a`` and ``b``, exchanging half
    bytes.

    Afterwards ``a`` has the low half bytes of both sources, and ``b`` the high ones (:func:`_exchange_fields`).
    """
    one, other = words_at(first), words_at(second)
    shift, mask = np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F)
    for j in range(words):
        a[j], b[j] = _exchange_fields(one[j], other[j], shift, mask)
    if rest:
        a[words] = last_word(first + np.uint64(8 * words), rest)
        b[words] = last_word(second + np.uint64(8 * words), rest)
        _swap(a, b, shift, mask, words, words + 1)


@compiled
def _swap(a: Numbers, b: Numbers, shift: Number, mask: Number, start: Number, stop: Number) -> None:
    """Apply :func:`_exchange_fields` in place to the words ``start`` to ``stop - 1`` of the planes ``a`` and ``b``."""
    for j in range(start, stop):
        a[j], b[j] = _exchange_fields(a[j], b[j], shift, mask)


@compiled
def _exchange_fields(low: Number, high: Number, shift: Number, mask: Number) -> tuple[Number, Number]:
    """Return (``low``, ``high``) after exchanging fields between these two words.

    The bits of ``high`` under ``mask`` change places with the bits of ``low`` that are ``shift`` positions higher.
    """
    moved = ((low >> shift) ^ high) & mask
    return low ^ (moved << shift), high ^ moved


@compiled
def _unpack(at: Numbers, skip: Number, codes: Number, bits: Number, plane: Numbers) -> None:
    """Fill ``plane`` so that each byte holds one code of each update, for ``bits`` that do not divide 8.

    The bits of byte j from ``bits * k`` on become code j of update k. Its codes begin ``skip`` bits behind address
    ``at[k]``; there are ``codes`` of them. Eight codes share one integer, which is halved three times: each half moves
    to its half of the resulting integer.
    """
    count = (skip + bits * codes + 7) >> 3
    for k in range(at.shape[0]):
        up = np.uint64(bits * k)
        for j in range((codes + 7) >> 3):
            start = at[k] + np.uint64(bits * j)
            rest = count - bits * j
            word = words_at(start)[0] if rest >= 8 else last_word(start, rest)
            word >>= np.uint64(skip)
            for half in (4, 2, 1):
                apart, mask = np.uint64(half * (8 - bits)), _repeat_mask(half, bits)
                word = word & mask | word << apart & mask << np.uint64(8 * half)
            plane[j] = word << up if k == 0 else plane[j] | word << up


@compiled
def _repeat_mask(half: Number, bits: Number) -> Number:
    """Return the integer whose lowest ``half * bits`` bits are set, in each field of ``16 * half`` bits."""
    mask = (np.uint64(1) << np.uint64(half * bits)) - np.uint64(1)
    span = np.uint64(16 * half)
    while span < np.uint64(64):
        mask |= mask << span
        span += span
    return mask


@compiled
def _look_up(
    tables: Numbers, planes: Numbers, skip: Number, fill: Number, ahead: Numbers, out: Numbers
) -> None:
    """Add to ``out`` the sums that the bytes of four groups select in ``tables``; with ``fill``, overwrite ``out``.

    Entry i uses byte ``(skip + i) // p`` of plane ``(skip + i) % p``, for p planes. The memory lines ``ahead``
    (addresses) are prefetched on the way, a few at a time.
    """
    count, words = planes.shape[1], planes.shape[2]
    step, stop = 8 * count, skip + out.shape[0]
    first, last = -(-skip // step), stop // step
    if first >= last:
        _look_up_some(tables, planes, skip, fill, out, 0, out.shape[0])
        return
    sums, codes = longs_at(np.uint64(out.ctypes.data)), words_at(np.uint64(planes.ctypes.data))
    low, apart = np.uint64(255), count * words
    table, length = np.uint64(tables.ctypes.data), np.uint64(8 * _TABLE)
    one, two = longs_at(table), longs_at(table + length)
    three, four = longs_at(table + length + length), longs_at(table + length + length + length)
    lines, share, asked = words_at(np.uint64(ahead.ctypes.data)), -(-ahead.shape[0] // (last - first)), 0
    for j in range(first, last):
        stop = min(asked + share, ahead.shape[0])
        for line in range(asked, stop):
            prefetch(lines[line])
        asked = stop
        for plane in range(count):
            at, entry = plane * words + j, j * step + plane - skip
            a, b, c, d = codes[at], codes[at + apart], codes[at + 2 * apart], codes[at + 3 * apart]
            for byte in range(8):
                found = (one[a & low] + two[b & low]) + (three[c & low] + four[d & low])
                if fill:
                    sums[entry + count * byte] = found
                else:
                    sums[entry + count * byte] += found
                a, b, c, d = a >> np.uint64(8), b >> np.uint64(8), c >> np.uint64(8), d >> np.uint64(8)
    _look_up_some(tables, planes, skip, fill, out, 0, first * step - skip)
    _look_up_some(tables, planes, skip, fill, out, last * step - skip, out.shape[0])


@compiled
def _look_up_some(
    tables: Numbers, planes: Numbers, skip: Number, fill: Number, out: Numbers, start: Number, stop: Number
) -> None:
    """Add to ``out`` the sums that bytes select in ``tables``, for the entries ``start`` to ``stop - 1`` only.

    Arguments as in :func:`_look_up`. Entries are added one by one and without prefetching.
    """
    codes, count = planes.view(np.uint8), planes.shape[1]
    for i in range(start, stop):
        byte, plane = (skip + i) // count, (skip + i) % count
        found = np.int64(0)
        for group in range(tables.shape[0]):
            found += tables[group, codes[group, plane, byte]]
        out[i] = found if fill else out[i] + found
