"""A device that runs rounds; an agent and a scripted server on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import LONG, StartAgent
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer
from tests.device_runtime.rounds import Device
from tests.device_runtime.tiny import World


@pytest.fixture
def world() -> World:
    return World(tiny.make_bundle())


@pytest.fixture
def endless() -> World:
    """A round that is not over before the test says so."""
    return World(tiny.make_bundle(steps=(LONG,)))


@pytest.fixture
def server(broker: BrokerProcess, connect: SessionFactory, federation: str) -> ScriptedServer:
    return ScriptedServer(connect(broker.address), federation)


@pytest.fixture
def start(broker: BrokerProcess, federation: str, tmp_path: Path, limits: Limits) -> Iterator[StartAgent]:
    """Start an agent; each call is a new process of the same device."""
    agents: list[RunningAgent] = []

    def make(**options: object) -> RunningAgent:
        agent = RunningAgent(
            federation,
            broker.address,
            tmp_path,
            options.pop("limits", limits),  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.stop()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path, World(tiny.make_bundle()))
    yield made
    made.store.close()
