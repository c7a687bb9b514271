"""Takes the rows of each batch from the end of the shuffled order."""

from __future__ import annotations

from edgefl.wire.tensors import Array
from edgefl_device.data.samples import Batches

_order = Batches._order


def plant() -> None:
    def backwards(self: Batches, stream: int) -> Array:
        return _order(self, stream)[::-1]

    Batches._order = backwards  # type: ignore[method-assign]
