"""How close a prediction of memory has to be."""

from __future__ import annotations

import pytest

LIBRARY_BYTES = 6 * 2**20
"""How much of the runtime's own code is resident depends on what the system has of its file in memory."""


def near(peak: int):  # type: ignore[no-untyped-def]
    """Within 15 % of a measured peak, and as much as shared libraries vary."""
    return pytest.approx(peak, rel=0.15, abs=LIBRARY_BYTES)
