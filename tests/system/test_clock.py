"""Deadlines are kept by a clock that nobody sets."""

from __future__ import annotations

import time

import pytest

from edgefl.system.clock import steady_time


def test_steady_time_begins_as_the_wall_clock_and_follows_no_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_time()
    assert abs(before - time.time()) < 3600

    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 86_400)

    assert 0 <= steady_time() - before < 3600
