"""A service and scripted devices on a real broker, and phones that are asked for profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl_server.profiling.fleet import ProfilingOptions
from edgefl_server.profiling.rows import by_tier
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory
from tests.server.fleet import (
    MakeDevice,
    RunningServer,
    ScriptedDevice,
    plan_for,
)
from tests.server.profiling.phones import WEAK, Behaviour, MakePhone, Phone


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


@pytest.fixture
def phones(broker: BrokerProcess, connect: SessionFactory, federation: str) -> Iterator[MakePhone]:
    made: list[Phone] = []

    def make(name: str, behave: Behaviour, **options: object) -> Phone:
        made.append(Phone(connect(broker.address), federation, name, behave, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for phone in made:
        phone.stop()


@pytest.fixture
def wanted(federation: str, limits: Limits) -> ProfilingOptions:
    return ProfilingOptions(
        federation=federation,
        offered=by_tier([WEAK]),
        timeout_s=30.0,
        settle_s=0.3,
        answer_s=0.5,
        grace_s=0.3,
        again_s=0.2,
        limits=limits,
    )
