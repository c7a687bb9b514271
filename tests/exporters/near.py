"""How close a prediction of memory has to be."""

from __future__ import annotations

import pytest

LIBRARY_BYTES = 10 * 2**20
"""How much of the runtime's own code is resident differs between systems: it lets go of it after loading a graph, and
what running brings back depends on how much the system maps at a time. 7 MB more than here have been seen."""


def near(peak: int):  # type: ignore[no-untyped-def]
    """Within 15 % of a measured peak, and as much as shared libraries vary."""
    return pytest.approx(peak, rel=0.15, abs=LIBRARY_BYTES)
