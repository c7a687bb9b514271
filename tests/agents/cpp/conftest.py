"""A scripted server, and C++ agents that reach it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.cpp.processes import CppAgent
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.agent.scripted import ScriptedServer, write_data

StartAgent = Callable[..., CppAgent]


@pytest.fixture
def server(mosquitto: BrokerProcess, connect: SessionFactory, federation: str) -> ScriptedServer:
    return ScriptedServer(connect(mosquitto.address), federation)


@pytest.fixture
def start(tmp_path: Path, mosquitto: BrokerProcess, federation: str) -> StartAgent:
    """Start an agent of the test's federation with more options; a later one has the same data and store."""

    def started(*options: object) -> CppAgent:
        return CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "state", *options)

    return started
