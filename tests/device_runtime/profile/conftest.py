"""An asker, and agents that measure what a script says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from edgefl.wire.limits import Limits
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.asking import Asker, Scripted
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.profile.asked import patient


@pytest.fixture
def asker(server: ScriptedServer) -> Asker:
    return Asker(server)


@pytest.fixture
def script() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.go.set()


@pytest.fixture
def start_scripted(start: StartAgent, script: Scripted, limits: Limits) -> StartAgent:
    """Agents that measure what the script says, can send it in one message, and wait long for what comes."""
    return partial(start, measure=script, limits=patient(limits))
