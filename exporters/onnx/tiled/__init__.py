"""Chains of ops by rows, a few rows at a time: what stands between the first and the last stays in a cache.

Op by op, each value of a chain goes to memory and comes back. Where the first axis is the batch, or the tokens of one, and
every op makes a row of the same row of what it reads, a loop goes through the whole chain with some rows before it takes the
next ones::

    a = f(x); b = g(a, y); c = h(b)      [32, 64, 1024]
    -> Scan over [16, 2, 64, 1024] of x and y: c[i] = h(g(f(x[i]), y[i]))

``Scan`` hands its body views of its inputs, and lets it write into its outputs, so nothing is copied. The same ops make the
same numbers. On several threads each op of the loop has less to share among them, so that a device decides by trying.
"""

from __future__ import annotations

import onnx

from exporters.onnx.peak import live_peak
from exporters.onnx.tiled.chains import chains
from exporters.onnx.tiled.write import write
from exporters.onnx.values import Values

__all__ = ["tiled"]

ROOM = 1.02
"""What values may need at a time, as a multiple of what they needed."""


def tiled(model: bytes) -> bytes | None:
    """The ONNX model with its large chains in loops; None where it has none, or its values need more than a little more
    then: an op may run later in a chain than it did alone."""
    proto = onnx.load_from_string(model)
    values = Values(proto.graph)
    found, most = chains(values), ROOM * live_peak(values)
    if not found:
        return None
    write(values, found)
    if live_peak(Values(proto.graph)) > most:
        return None
    return bytes(proto.SerializeToString(deterministic=True))
