"""A run's folder that is long over, with hostile words in it, and its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.dashboard import SyntheticRun
from edgefl_server.events import DeviceFailed, DeviceJoined, Warned
from tests.server.dashboard.served import TOKEN, PageProcess

HOSTILE = "=cmd|' calc'!A0"
MARKUP = "<img src=x onerror=alert(1)>\"'&"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 60 devices that trained for 3 rounds, and one whose name and words are meant to do harm."""
    path = tmp_path_factory.mktemp("run") / "out"
    made = SyntheticRun(path, devices=60, rounds=3)
    made.write_past()
    made.feed.take(DeviceJoined(device=HOSTILE, tier=MARKUP))
    made.feed.take(DeviceFailed(device=HOSTILE, round=3, text=MARKUP))
    made.feed.take(Warned(tier="", text="\t+1+1"))
    made.close()
    return path


@pytest.fixture(scope="session")
def page(folder: Path) -> Iterator[PageProcess]:
    with PageProcess.of(folder, TOKEN) as served:
        yield served
