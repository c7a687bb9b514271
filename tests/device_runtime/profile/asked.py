"""What tests of a device that is asked for profiles share."""

from __future__ import annotations

import queue

import msgspec

from edgefl.wire.limits import Limits
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.asking import Asker
from tests.device_runtime.agent.scripted import RunningAgent

STALE = "ffeeddccbbaa9988"


def patient(limits: Limits, **changes: float) -> Limits:
    return msgspec.structs.replace(limits, **{"chunk_bytes": 4096, "fetch_timeout_s": 5.0, **changes})


def ready(start: StartAgent, asker: Asker, **options: object) -> RunningAgent:
    agent = start(**options)
    asker.server.hello()
    return agent


def next_text(agent: RunningAgent, within_s: float) -> str:
    """The text of the agent's next event; empty if there is none so soon."""
    try:
        return agent.events.get(timeout=within_s).text
    except queue.Empty:
        return ""


def decline_details(agent: RunningAgent) -> str:
    """Return what the agent's own log says of the next request that it declines."""
    while not (text := agent.event("profile").text).startswith("declined"):
        pass
    return text
