"""Writes the gaps of a mask as the distances between its bits."""

from __future__ import annotations

import numpy as np

from edgefl.wire import bits
from edgefl.wire.bits import Packed


def plant() -> None:
    def distances(packed: Packed, count: int) -> bytes:
        places = np.flatnonzero(np.unpackbits(packed, bitorder="little")[:count])
        return bytes(int(gap) & 0x7F for gap in np.diff(places, prepend=0))

    bits.to_gaps = distances
