"""A store of either agent is one of the other: a device may change its agent in the middle of a round."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Profile, Update
from tests.agents.cpp.processes import CppAgent
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import LONG
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer, write_data
from tests.device_runtime.tiny import World

STEPS = 600


@pytest.fixture
def server(mosquitto: BrokerProcess, connect: SessionFactory, federation: str) -> ScriptedServer:
    return ScriptedServer(connect(mosquitto.address), federation)


def bare(update: Update) -> Update:
    """Without what it cost."""
    nothing = Profile(
        step_ms=0, forward_ms=0, load_ms=0, idle_bytes=0, peak_bytes=0, down_bytes=0, down_wire_bytes=0
    )
    return msgspec.structs.replace(update, profile=nothing)


def undisturbed(server: ScriptedServer, agent: RunningAgent, world: World) -> Update:
    server.open(world)
    update = server.update()
    agent.stop()
    return bare(update)


def test_cpp_goes_on_with_a_round_that_python_began(
    tmp_path: Path, mosquitto: BrokerProcess, server: ScriptedServer, federation: str, limits: Limits
) -> None:
    world = World(tiny.make_bundle(steps=(STEPS,)))
    (tmp_path / "calm").mkdir()
    whole = undisturbed(server, RunningAgent(federation, mosquitto.address, tmp_path / "calm", limits), world)
    begun = RunningAgent(federation, mosquitto.address, tmp_path, limits)
    server.hello()
    server.assign(world.task())
    server.progress(1)
    begun.stop()
    left = [begun.events.get().event for _ in range(begun.events.qsize())]
    agent = CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "state")
    update = server.update()

    assert "stopped" in left
    assert bare(update) == whole
    server.ack(update)
    agent.event("accepted")
    assert agent.stop() == 0


def test_python_sends_what_cpp_had_computed_and_knows_what_it_knew(
    tmp_path: Path, mosquitto: BrokerProcess, server: ScriptedServer, federation: str, limits: Limits
) -> None:
    agent = CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "state")
    server.open(World(tiny.make_bundle()))
    computed = server.update()
    agent.process.send_signal(signal.SIGKILL)
    agent.ended()
    other = RunningAgent(federation, mosquitto.address, tmp_path, limits)
    again = server.update()
    server.ack(again)
    other.event("accepted")
    other.stop()

    assert again == computed


def test_a_stopped_cpp_agent_resumes_its_round(
    tmp_path: Path, mosquitto: BrokerProcess, server: ScriptedServer, federation: str
) -> None:
    endless = World(tiny.make_bundle(steps=(LONG,)))
    agent = CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "state")
    server.open(endless)
    reached = server.progress(100).step
    assert agent.stop() == 0
    assert agent.event("stopped")["details"]["round"] == 1
    again = CppAgent.of(federation, mosquitto.address, tmp_path / "data.npz", tmp_path / "state")

    assert server.progress(1).step > reached - 20
    assert again.stop() == 0


def test_a_task_that_comes_back_after_its_round_was_closed_is_kept_again(
    tmp_path: Path, mosquitto: BrokerProcess, server: ScriptedServer, federation: str
) -> None:
    endless = World(tiny.make_bundle(steps=(LONG,)))
    agent = CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "state")
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
    tmp_path: Path,
    mosquitto: BrokerProcess,
    server: ScriptedServer,
    federation: str,
    limits: Limits,
    kind: str,
) -> None:
    def started(folder: Path) -> CppAgent | RunningAgent:
        folder.mkdir(exist_ok=True)
        if kind == "python":
            return RunningAgent(federation, mosquitto.address, folder, limits, until_done=True)
        return CppAgent.of(
            federation, mosquitto.address, write_data(folder), folder / "state", "--until-done"
        )

    world = World(tiny.make_bundle())
    first = started(tmp_path / "first")
    server.open(world)
    server.ack(server.update())
    first.event("accepted")
    first.stop()
    server.announce(world.announcement(state="done"))
    again = started(tmp_path / "first")
    again.event("done")
    server.open(world, number=2, run="next")
    server.ack(server.update(2))
    again.event("accepted")
    server.announce(world.announcement(number=2, run="next", state="done"))
    assert not again.ended()
