"""Blocks: stretches of an update that stay together in the model, and what every loop over them shares.

``blocks``, ``index`` and ``size`` are those of :mod:`server.aggregate.scatter`. After a change of this file, delete the
``__pycache__`` folder of the server (:mod:`server.aggregate.native` says why).
"""

from __future__ import annotations

import numpy as np

from server.aggregate.native import Number, Numbers, bytes_at, compiled
from server.aggregate.scatter import LENGTH, TARGET


@compiled
def place(block: Numbers, size: Number, sums: Numbers, scratch: Numbers) -> Numbers:
    """Where the block's sums go: its part of ``sums``, or scratch if its places are scattered."""
    at, count = block[TARGET], block[LENGTH]
    return sums[at : at + count] if at < size else scratch[:count]


@compiled
def overwritten(block: Numbers, size: Number, fresh: Number) -> bool:
    """Whether what lies at the block's :func:`place` counts for nothing."""
    return bool(fresh or block[TARGET] >= size)


@compiled
def spread(out: Numbers, block: Numbers, index: Numbers, size: Number, sums: Numbers) -> None:
    """Add ``out`` to the places of ``block``, if it is scratch."""
    if block[TARGET] >= size:
        at = block[TARGET] - size
        places = index[at : at + out.shape[0]]
        for i in range(out.shape[0]):
            sums[places[i]] += out[i]


@compiled
def few(addresses: Numbers, first: Number, source: Number, skipped: Number, found: Numbers) -> None:
    """Fill ``found`` with the addresses of array ``source`` of the updates from ``first`` on, the last one repeated, each
    ``skipped`` bytes further."""
    for k in range(found.shape[0]):
        found[k] = addresses[min(first + k, addresses.shape[0] - 1), source] + np.uint64(skipped)


@compiled
def last_word(address: Number, count: Number) -> Number:
    """The ``count`` bytes (at most 8) at ``address`` as a word; what lies behind is not read."""
    word, source = np.uint64(0), bytes_at(address)
    for j in range(count):
        word |= np.uint64(source[j]) << np.uint64(8 * j)
    return word
