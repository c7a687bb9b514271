"""A service and scripted devices on a real broker, and phones that are asked for profiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.session import Session
from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
from edgefl_server.profiling.reports import by_tier
from edgefl_server.run_spec import RunSpec
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory
from tests.server.fleet import MakeDevice, MakePlan, RunningServer, ScriptedDevice, Serve, plan_for
from tests.server.profiling.phones import WEAK, Behaviour, MakePhone, Phone, Profile
from tests.wire.mqtt.events import wait_up


@pytest.fixture
def tmp_path(folder_in_memory: Path) -> Path:
    return folder_in_memory


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
def plan_of(federation: str, limits: Limits) -> MakePlan:
    """Function that makes the plan of this test's federation, with the rules that it is given."""
    return functools.partial(plan_for, federation, limits)


@pytest.fixture
def serve(mosquitto: Mosquitto, plan_of: MakePlan, tmp_path: Path) -> Iterator[Serve]:
    """``serve(**rules)`` or ``serve(plan, **options of the service)``: a server that runs in ``tmp_path / "out"``."""
    running: list[RunningServer] = []

    def start(plan: RunSpec | None = None, /, **given: Any) -> RunningServer:
        plan, options = (plan_of(**given), {}) if plan is None else (plan, given)
        running.append(RunningServer.start(plan, mosquitto.address, tmp_path / "out", **options))
        return running[-1]

    yield start
    for each in running:
        if each.thread and each.thread.is_alive():
            each.stop()


@pytest.fixture
def stranger(mosquitto: Mosquitto, connect: SessionFactory) -> Session:
    """Another client of the broker, which is connected."""
    session = connect(mosquitto.address)
    wait_up(session)
    return session


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


@pytest.fixture
def profile(broker: BrokerProcess, wanted: ProfilingOptions) -> Profile:
    """``profile(**changes to the options)``: ask the fleet on the broker."""
    return lambda **changes: FleetProfiler(broker.address, replace(wanted, **changes)).run()
