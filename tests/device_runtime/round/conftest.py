"""Rounds by the dozen."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def garbage_is_searched_once() -> None:
    """A round searches for garbage between its stages: what the tests before it left there is searched once."""
    gc.collect()
    gc.freeze()
