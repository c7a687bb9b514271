"""Which rows of a parametrised test run by default, and which with ``slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(rows: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """``rows`` for ``parametrize``, in their order, all marked slow but ``quick``. A row in ``quick`` has to exist."""
    every = list(rows)
    missing = [row for row in quick if row not in every]
    if missing:
        raise ValueError(f"no such rows: {missing}")
    return [row if row in quick else _slow(row) for row in every]


def _slow(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)
