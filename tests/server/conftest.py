"""A service and scripted devices on a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from tests.conftest import Mosquitto
from tests.server.fleet import (
    RunningServer,
    ScriptedDevice,
    plan_for,
)
from tests.server.served import MakeDevice


@pytest.fixture
def device(mosquitto: Mosquitto, federation: str, limits: Limits) -> Iterator[MakeDevice]:
    made: list[ScriptedDevice] = []

    def make(name: str, answer: Any = None, **hello: Any) -> ScriptedDevice:
        made.append(ScriptedDevice(mosquitto.address, federation, name, limits, answer, **hello))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def serve(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def start(**rules: Any) -> RunningServer:
        plan = plan_for(federation, limits, **rules)
        running.append(RunningServer.start(plan, mosquitto.address, tmp_path / "out"))
        return running[-1]

    yield start
    for each in running:
        if each.thread and each.thread.is_alive():
            each.stop()
