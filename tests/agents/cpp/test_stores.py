"""A store of either agent is one of the other: a device may change its agent in the middle of a round."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import ResourceUsage, Update
from tests.agents.cpp.conftest import StartAgent
from tests.agents.cpp.processes import CppAgent
from tests.conftest import BrokerProcess
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import LONG
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer
from tests.device_runtime.tiny import World

STEPS = 600


StartPython = Callable[..., RunningAgent]


@pytest.fixture
def start_python(tmp_path: Path, mosquitto: BrokerProcess, federation: str, limits: Limits) -> StartPython:
    """Start a Python agent, of the data and the store of ``start`` where no other folder is given."""
    return lambda folder=tmp_path, **options: RunningAgent(
        federation, mosquitto.address, folder, limits, **options
    )


def bare(update: Update) -> Update:
    """Without what it cost."""
    nothing = ResourceUsage(
        step_ms=0, forward_ms=0, load_ms=0, idle_bytes=0, peak_bytes=0, down_bytes=0, down_wire_bytes=0
    )
    return msgspec.structs.replace(update, profile=nothing)


def undisturbed(server: ScriptedServer, agent: RunningAgent, world: World) -> Update:
    server.open(world)
    update = server.update()
    agent.stop()
    return bare(update)


def test_cpp_goes_on_with_a_round_that_python_began(
    tmp_path: Path, server: ScriptedServer, start: StartAgent, start_python: StartPython
) -> None:
    world = World(tiny.make_bundle(steps=(STEPS,)))
    (tmp_path / "calm").mkdir()
    whole = undisturbed(server, start_python(tmp_path / "calm"), world)
    begun = start_python()
    server.hello()
    server.assign(world.task())
    server.progress(1)
    begun.stop()
    left = [begun.events.get().event for _ in range(begun.events.qsize())]
    agent = start()
    update = server.update()

    assert "stopped" in left
    assert bare(update) == whole
    server.ack(update)
    agent.event("accepted")
    assert agent.stop() == 0


def test_python_sends_what_cpp_had_computed_and_knows_what_it_knew(
    server: ScriptedServer, start: StartAgent, start_python: StartPython
) -> None:
    agent = start()
    server.open(World(tiny.make_bundle()))
    computed = server.update()
    agent.process.send_signal(signal.SIGKILL)
    agent.ended()
    other = start_python()
    again = server.update()
    server.ack(again)
    other.event("accepted")
    other.stop()

    assert again == computed


def test_a_stopped_cpp_agent_resumes_its_round(server: ScriptedServer, start: StartAgent) -> None:
    endless = World(tiny.make_bundle(steps=(LONG,)))
    agent = start()
    server.open(endless)
    reached = server.progress(100).step
    assert agent.stop() == 0
    assert agent.event("stopped")["details"]["round"] == 1
    again = start()

    assert server.progress(1).step > reached - 20
    assert again.stop() == 0


def test_a_task_that_comes_back_after_its_round_was_closed_is_kept_again(
    tmp_path: Path, server: ScriptedServer, start: StartAgent
) -> None:
    endless = World(tiny.make_bundle(steps=(LONG,)))
    agent = start()
    server.open(endless)
    agent.event("round")
    server.announce(endless.announcement(state="closed"))
    agent.event("aborted")
    server.announce(endless.announcement())
    agent.event("round")
    agent.process.send_signal(signal.SIGKILL)
    agent.ended()

    with closing(sqlite3.connect(tmp_path / "state" / "store.sqlite3")) as db:
        assert db.execute("SELECT COUNT(*) FROM job").fetchone() == (1,)


@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_a_device_waits_for_the_next_run(
    server: ScriptedServer, start: StartAgent, start_python: StartPython, kind: str
) -> None:
    def started() -> CppAgent | RunningAgent:
        return start_python(until_done=True) if kind == "python" else start("--until-done")

    world = World(tiny.make_bundle())
    first = started()
    server.open(world)
    server.ack(server.update())
    first.event("accepted")
    first.stop()
    server.announce(world.announcement(state="done"))
    again = started()
    again.event("done")
    server.open(world, number=2, run="next")
    server.ack(server.update(2))
    again.event("accepted")
    server.announce(world.announcement(number=2, run="next", state="done"))
    assert not again.ended()
