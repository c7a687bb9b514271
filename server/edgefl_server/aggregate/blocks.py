"""Sink and helpers of the loops over blocks; a block is a stretch of an update that is contiguous in the model.

The layout of ``blocks`` is defined in :mod:`edgefl_server.aggregate.scatter`. After a change of this file, delete the
``__pycache__`` folder of the server (the reason is in :mod:`edgefl_server.aggregate.native`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgefl_server.aggregate.native import FUSED, Number, Numbers, bytes_at, compiled, floats_at, fused
from edgefl_server.aggregate.scatter import LENGTH, TARGET


class Sink(NamedTuple):
    """Output of a loop: sums in memory, or the new model if ``new`` is not empty.

    Attributes:
        places: Model positions of scattered entries (``index`` of :mod:`edgefl_server.aggregate.scatter`).
        size: Entries of the model.
        fresh: True if the content of ``sums`` is undefined and has to be overwritten.
        sums: Fixed-point sums, int64 [size]. Unused with ``new``.
        new: New model, float32 [size], which :func:`mean` writes; [0] if only sums are wanted. With it no entry
            is scattered.
        old: Memory addresses of the old model's tensors, uint64 [tensors].
        starts: First entry of each of these tensors, int64 [tensors + 1]; the last one is ``size``.
        weights: Total weight of each entry, int64 [size], or [1] if all are equal.
        scale: Fixed-point value of 1.0.
        change: True to add the mean to the old model.
    """

    places: Numbers
    size: Number
    fresh: Number
    sums: Numbers
    new: Numbers
    old: Numbers
    starts: Numbers
    weights: Numbers
    scale: Number
    change: Number


@compiled
def place(block: Numbers, sink: Sink, scratch: Numbers) -> Numbers:
    """Return the array to which a loop adds the sums of ``block`` (a stretch of entries), int64 [entries of the
    block].

    It is a view of ``sink.sums``, or of ``scratch`` if the entries are scattered in the model or only the new model is
    wanted.
    """
    at, count = block[TARGET], block[LENGTH]
    return sink.sums[at : at + count] if at < sink.size and sink.new.shape[0] == 0 else scratch[:count]


@compiled
def is_undefined(block: Numbers, sink: Sink) -> bool:
    """Return True if the array that :func:`place` returned has undefined content, so that a loop must overwrite it.

    If False, the loop adds to it.
    """
    return bool(sink.fresh or block[TARGET] >= sink.size)


@compiled
def store_sums(out: Numbers, block: Numbers, sink: Sink) -> None:
    """Finish a block, whose sums a loop has added to ``out``, the array that :func:`place` returned.

    If ``out`` is scratch memory, scattered sums are added to their positions in the sums. With ``sink.new``, ``out``
    becomes entries of the new model.
    """
    if block[TARGET] >= sink.size:
        at = block[TARGET] - sink.size
        places = sink.places[at : at + out.shape[0]]
        for i in range(out.shape[0]):
            sink.sums[places[i]] += out[i]
    elif sink.new.shape[0]:
        _renew(out, block[TARGET], sink)


@compiled
def _renew(out: Numbers, start: Number, sink: Sink) -> None:
    """Write ``out.size`` entries of the new model, from position ``start`` of the flat model on, computed from the
    sums ``out``.
    """
    tensor, done = np.searchsorted(sink.starts, start, "right") - 1, 0
    weights = sink.weights
    while done < out.shape[0]:
        at = start + done
        count = min(sink.starts[tensor + 1] - at, out.shape[0] - done)
        old = floats_at(sink.old[tensor] + np.uint64(4 * (at - sink.starts[tensor])))
        own = weights if weights.shape[0] == 1 else weights[at : at + count]
        mean(out[done : done + count], own, sink.scale, old, sink.change, sink.new[at : at + count])
        tensor, done = tensor + 1, done + count


@compiled
def mean(sums: Numbers, weights: Numbers, scale: Number, old: Numbers, change: Number, new: Numbers) -> None:
    """Write the weighted mean into ``new``: ``sums / (weights * scale)``, plus ``old`` if ``change`` is true.

    Entries with weight 0 are copied from ``old``. ``weights`` has one number per entry, or one for all.
    """
    if weights.shape[0] == 1 and weights[0] > 0:
        _mean_of_all(sums, np.float64(weights[0]) * scale, old, change, new)
        return
    single = weights.shape[0] == 1
    for i in range(sums.shape[0]):
        weight = weights[0] if single else weights[i]
        value = np.float64(sums[i]) / (np.float64(max(weight, 1)) * scale)
        if change:
            value += np.float64(old[i])
        new[i] = value if weight > 0 else old[i]


@compiled
def _mean_of_all(sums: Numbers, share: Number, old: Numbers, change: Number, new: Numbers) -> None:
    """Write ``sums / share`` into ``new``, plus ``old`` if ``change`` is true, for entries of equal weight.

    ``share`` is the weight times the fixed-point value of 1.0. The separate loops have no branch, so that compilers
    vectorize them.
    """
    nearly = 1.0 / share
    if change:
        for i in range(sums.shape[0]):
            new[i] = np.float64(old[i]) + quotient(np.float64(sums[i]), share, nearly)
    else:
        for i in range(sums.shape[0]):
            new[i] = quotient(np.float64(sums[i]), share, nearly)


@compiled
def quotient(a: Number, b: Number, nearly: Number) -> Number:
    """Return ``a / b``, correctly rounded. ``nearly`` is ``1 / b``; no value may be near the limits of float64.

    This is faster than a division. The first remainder brings the quotient to within one unit in the last place. The
    second one gives the result of a division (P. Markstein, Computation of elementary functions on the IBM RISC
    System/6000 processor, 1990).
    """
    if not FUSED:
        return a / b
    first = a * nearly
    second: Number = fused(fused(-b, first, a), nearly, first)
    return fused(fused(-b, second, a), nearly, second)


@compiled
def fill_addresses(
    addresses: Numbers, first: Number, source: Number, skipped: Number, found: Numbers
) -> None:
    """Fill ``found`` with the addresses of array ``source`` of consecutive updates, beginning with update ``first``.

    ``addresses`` is uint64 [updates, arrays]. Each address is increased by ``skipped`` bytes. Elements of ``found``
    behind the last update repeat its address.
    """
    for k in range(found.shape[0]):
        found[k] = addresses[min(first + k, addresses.shape[0] - 1), source] + np.uint64(skipped)


@compiled
def last_word(address: Number, count: Number) -> Number:
    """Return the ``count`` bytes (at most 8) at ``address`` as a little-endian integer. Reads no byte behind them."""
    word, source = np.uint64(0), bytes_at(address)
    for j in range(count):
        word |= np.uint64(source[j]) << np.uint64(8 * j)
    return word
