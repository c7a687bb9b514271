"""Seconds that pass as seconds do."""

from __future__ import annotations

import time

import pytest

from edgefl.system.clock import steady_time


def test_a_time_of_day_that_is_set_anew_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_time()
    monkeypatch.setattr(time, "time", lambda: before + 1e6)
    assert before <= steady_time() < before + 1e5
