"""Compiled loops that scan flat arrays once, to validate an update before it is added.

They follow the rules of :mod:`edgefl_server.aggregate.kernels`.
"""

from __future__ import annotations

import numpy as np

from edgefl_server.aggregate.native import (
    Number,
    Numbers,
    bytes_at,
    compiled,
    patterns_at,
    set_bits,
    shorts_at,
    words_at,
)


@compiled
def _below(bits: Number) -> Number:
    """Return the integer whose lowest ``bits`` (at most 63) bits are set."""
    return (np.uint64(1) << np.uint64(bits)) - np.uint64(1)


@compiled
def count_bits(address: Number, firsts: Numbers, lengths: Numbers, counts: Numbers) -> None:
    """Set ``counts[b]`` to the number of set bits among the ``lengths[b]`` bits from bit ``firsts[b]`` on.

    Bits are counted from the memory address ``address``. Memory beyond them is not read.
    """
    for b in range(firsts.shape[0]):
        skip = firsts[b] & 7
        start, stop = np.uint64(address) + np.uint64(firsts[b] >> 3), skip + lengths[b]
        words, ones = words_at(start), np.int64(0)
        for j in range(stop >> 6):
            ones += np.int64(set_bits(words[j]))
        rest = stop & 63
        if rest:
            left, source = np.uint64(0), bytes_at(start + np.uint64((stop >> 6) << 3))
            for j in range((rest + 7) >> 3):
                left |= np.uint64(source[j]) << np.uint64(8 * j)
            ones += np.int64(set_bits(left & _below(rest)))
        if skip and lengths[b] > 0:
            before = np.uint64(bytes_at(start)[0]) & _below(min(skip, stop))
            ones -= np.int64(set_bits(before))
        counts[b] = ones if lengths[b] > 0 else 0


@compiled
def largest(addresses: Numbers, counts: Numbers) -> int:
    """Return the largest magnitude among float32 arrays, as the 31 bits below the sign.

    Array k has ``counts[k]`` values at address ``addresses[k]``. These bits sort like magnitudes, with infinity above
    all numbers and NaN above infinity.
    """
    most = np.uint32(0)
    for k in range(addresses.shape[0]):
        patterns, own = patterns_at(addresses[k]), np.uint32(0)
        for i in range(counts[k]):
            own = max(own, patterns[i] & np.uint32(0x7FFFFFFF))
        most = max(most, own)
    return int(most)


@compiled
def largest_half(addresses: Numbers, counts: Numbers) -> int:
    """Return the largest magnitude among arrays of 16-bit floats (float16 or bfloat16), as the 15 bits below its sign.

    Array k has ``counts[k]`` values at address ``addresses[k]``.
    """
    most = np.uint16(0)
    for k in range(addresses.shape[0]):
        patterns, own = shorts_at(addresses[k]), np.uint16(0)
        for i in range(counts[k]):
            own = max(own, patterns[i] & np.uint16(0x7FFF))
        most = max(most, own)
    return int(most)
