"""Runs of a dozen scripted devices and their server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from tests.conftest import Mosquitto
from tests.server.fleet import RunningServer, ScriptedDevice
from tests.server.shards.fleets import NAMES, started


@pytest.fixture
def fleet(mosquitto: Mosquitto, limits: Limits, tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server and its devices under a name of their own; all end with the test."""
    running: list[Any] = []

    def start(federation: str, out: str, answer: Any = None, **options: Any) -> RunningServer:
        for name in NAMES:
            running.append(ScriptedDevice(mosquitto.address, federation, name, limits, answer))
        server = started(federation, mosquitto.address, tmp_path / out, limits, **options)
        running.append(server)
        return server

    yield start
    for each in running:
        if isinstance(each, ScriptedDevice) or (each.thread and each.thread.is_alive()):
            each.stop()
