"""An assertion on the regions of submodels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgefl.wire.regions import BlockRegion, Region, pieces


def assert_inside(regions: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fail unless every region lies inside the global tensors of these ``shapes`` and names no entry twice."""
    for name, region in regions.items():
        if isinstance(region, BlockRegion):
            sizes = zip(region.axes, shapes[name], strict=True)
            assert all(axis is None or 0 <= min(axis) <= max(axis) < size for axis, size in sizes), name
        for part, positions in pieces(name, region, shapes):
            assert part in shapes, name
            assert positions is None or (np.diff(np.sort(positions)) > 0).all(), name
            assert positions is None or positions.max(initial=0) < math.prod(shapes[part]), name
