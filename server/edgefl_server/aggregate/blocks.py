"""Sink and helpers of the loops over blocks, the stretches of an update that stay together in the model.

The layout of ``blocks`` is defined in :mod:`edgefl_server.aggregate.scatter`. After a change of this file,
delete the ``__pycache__`` folder of the server (:mod:`edgefl_server.aggregate.native` says why).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgefl_server.aggregate.native import FUSED, Number, Numbers, bytes_at, compiled, floats_at, fused
from edgefl_server.aggregate.scatter import LENGTH, TARGET


class Sink(NamedTuple):
    """Target of a loop's sums: they go into ``sums`` (int64 [size]), at ``places`` where they are scattered (the
    ``index`` of :mod:`edgefl_server.aggregate.scatter`). ``fresh`` sums hold nothing yet, so their content is ignored.

    With ``new`` (float32 [size]; else [0]) they are all sums of a round, and none is scattered. :func:`mean` writes the
    new model to ``new``, and no loop uses ``sums``. ``old`` (uint64 [tensors]) are the addresses of the old one's
    tensors, which begin at the entries ``starts`` (int64 [tensors + 1], the last one being ``size``).
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
    """Return the memory for the block's sums.

    This is the block's part of ``sums``, or scratch if its places are scattered or only their mean is needed.
    """
    at, count = block[TARGET], block[LENGTH]
    return sink.sums[at : at + count] if at < sink.size and sink.new.shape[0] == 0 else scratch[:count]


@compiled
def overwritten(block: Numbers, sink: Sink) -> bool:
    """Return True if the content of the block's :func:`place` is to be ignored."""
    return bool(sink.fresh or block[TARGET] >= sink.size)


@compiled
def spread(out: Numbers, block: Numbers, sink: Sink) -> None:
    """Add ``out`` to the places of ``block``, if it is scratch; or make it a part of the new model."""
    if block[TARGET] >= sink.size:
        at = block[TARGET] - sink.size
        places = sink.places[at : at + out.shape[0]]
        for i in range(out.shape[0]):
            sink.sums[places[i]] += out[i]
    elif sink.new.shape[0]:
        _renew(out, block[TARGET], sink)


@compiled
def _renew(out: Numbers, start: Number, sink: Sink) -> None:
    """Write the new model from entry ``start`` on, for as many sums."""
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
    """Write ``new`` = sum / (weight * scale), with ``change`` added to ``old``; the bits of ``old`` where the weight is 0.

    ``weights`` has one number per entry, or a single one for all.
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
    """Write the mean where every entry has the same weight: loops without a branch, which processors do eight at a time."""
    nearly = 1.0 / share
    if change:
        for i in range(sums.shape[0]):
            new[i] = np.float64(old[i]) + quotient(np.float64(sums[i]), share, nearly)
    else:
        for i in range(sums.shape[0]):
            new[i] = quotient(np.float64(sums[i]), share, nearly)


@compiled
def quotient(a: Number, b: Number, nearly: Number) -> Number:
    """Return ``a / b``, correctly rounded. ``nearly`` is ``1 / b``, and no value is near the limits of float64's range.

    A division takes longer than what it is replaced with. The first remainder brings the quotient to within a unit of its
    last place, and from there the second one to what a division rounds to (P. Markstein, Computation of elementary
    functions on the IBM RISC System/6000 processor, 1990).
    """
    if not FUSED:
        return a / b
    first = a * nearly
    second: Number = fused(fused(-b, first, a), nearly, first)
    return fused(fused(-b, second, a), nearly, second)


@compiled
def few(addresses: Numbers, first: Number, source: Number, skipped: Number, found: Numbers) -> None:
    """Fill ``found`` with the addresses of array ``source`` of the updates from ``first`` on, the last one repeated, each
    ``skipped`` bytes further."""
    for k in range(found.shape[0]):
        found[k] = addresses[min(first + k, addresses.shape[0] - 1), source] + np.uint64(skipped)


@compiled
def last_word(address: Number, count: Number) -> Number:
    """Return the ``count`` bytes (at most 8) at ``address`` as an integer. Reads no byte behind them."""
    word, source = np.uint64(0), bytes_at(address)
    for j in range(count):
        word |= np.uint64(source[j]) << np.uint64(8 * j)
    return word
