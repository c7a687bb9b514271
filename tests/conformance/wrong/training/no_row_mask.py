"""Counts the rows that only fill the last batch of a pass over the data."""

from __future__ import annotations

import numpy as np

from edgefl.wire.tensors import Array
from edgefl_device.data.samples import Pass


def plant() -> None:
    def ones(self: Pass, step: int) -> Array:
        return np.ones(self.batch, np.float32)

    Pass.mask = ones  # type: ignore[method-assign]
