"""What the tests of the agent share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgefl_device.store.database import Store
from tests.device_runtime.agent.scripted import RunningAgent

LONG = 1_000_000

StartAgent = Callable[..., RunningAgent]


def store_of(folder: Path) -> Store:
    return Store(folder / "state", limit_bytes=1 << 20, history_rounds=5)
