"""The agent stopped, cut off and started again: nothing that it computed is lost or done twice."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.messages import Ack, Offer, Round
from edgefl.wire.mqtt.session import Session
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, AgentEvent, DeviceLog
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.round.job import decode_job
from edgefl_device.store.database import Outgoing, PastRound, Store
from tests.conftest import Mosquitto, SessionFactory, on_each_broker
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import DEVICE, RunningAgent, ScriptedServer, write_data
from tests.device_runtime.tiny import World
from tests.support.errors import StoreError, refuses

# -- stopped and started again ---------------------------------------------------------------------------------


@on_each_broker
def test_a_round_resumes(server: ScriptedServer, start: StartAgent, endless: World, tmp_path: Path) -> None:
    agent = start()
    server.open(endless)
    server.progress()
    agent.stop()
    assert "goes on with it when it is started again" in agent.event("stopped", "aborted").text
    store = store_of(tmp_path)
    saved = store.checkpoint("n1")
    store.close()
    assert saved is not None
    assert saved.step > 0

    start()

    assert server.progress().step > saved.step


@on_each_broker
def test_an_unacknowledged_update_is_resent(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.open(world)
    first = server.update()
    agent.stop()

    again = start()

    assert server.update() == first
    server.ack(first)
    assert again.event("round", "accepted").event == "accepted"


def test_a_kept_job_that_cannot_be_read_is_dropped(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    """Another release of the runtime wrote it."""
    store = store_of(tmp_path)
    store.open_job(b"\xc1 of another release")
    store.close()

    start()
    server.open(world)

    assert server.update().nonce == "n1"


@pytest.mark.parametrize("same_model", [True, False])
def test_a_kept_job_follows_a_changed_announcement_of_its_round(
    server: ScriptedServer, start: StartAgent, world: World, endless: World, tmp_path: Path, same_model: bool
) -> None:
    """The server came back with another chunk size, another export or another key."""
    agent = start()
    server.open(endless)
    server.progress()
    agent.stop()
    old = endless.job()
    announced = endless.announcement() if same_model else world.announcement()
    bundles = announced.offer("onnx").bundles
    offer = Offer(bundles=bundles, signatures={"weak": b"another key"})
    announced = msgspec.structs.replace(announced, offers={"onnx": offer})
    [mid] = announced.units["mid"]
    announced.units["mid"] = (msgspec.structs.replace(mid, chunk=1 << 20, digests=b""),)
    store = store_of(tmp_path)
    assert store.checkpoint("n1") is not None
    store.close()
    offline = offline_agent(tmp_path, announced)

    job = offline.rounds.next_job(announced)

    assert job == msgspec.structs.replace(
        old, bundle=bundles["weak"], units=announced.units, signature=b"another key", tries=1
    )
    kept = offline.store.job()
    assert kept is not None
    assert decode_job(kept) == job
    assert (offline.store.checkpoint("n1") is not None) == same_model
    offline.store.close()


def offline_agent(folder: Path, announced: Round | None = None) -> DeviceAgent:
    """An agent on the store of the one before, that never connects."""
    config = AgentConfig(
        federation=federation_of(folder),
        device=DEVICE,
        broker=Address("127.0.0.1", 1),
        data=write_data(folder),
        folder=folder / "state",
    )
    agent = DeviceAgent(config, OnnxEngine(), DeviceLog(lambda _: None))
    agent.rounds.announced = announced
    return agent


def test_an_update_settled_meanwhile_is_not_done_again(
    start: StartAgent, server: ScriptedServer, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().stop()
    agent = offline_agent(tmp_path, world.announcement())
    agent.rounds.task = world.task()
    agent.store.finish_job(Outgoing("run", 1, "n1", b"update"), None, "")
    waits = agent.store.waits

    def settled_meanwhile(nonce: str) -> bool:
        """The outbox thread gets the answer just before the agent asks whether the update waits."""
        agent.store.settle(PastRound(run="run", round=1, tier="weak", nonce=nonce, outcome="accepted"))
        return waits(nonce)

    monkeypatch.setattr(agent.store, "waits", settled_meanwhile)

    assert agent.rounds.next_job(world.announcement()) is None
    assert agent.store.job() is None
    assert agent.store.past("n1") is not None
    agent.store.close()


def federation_of(folder: Path) -> str:
    with sqlite3.connect(folder / "state" / "store.sqlite3") as db:
        found: str = db.execute("SELECT value FROM owner WHERE name = 'federation'").fetchone()[0]
    return found


def test_a_foreign_store_is_refused_at_start(
    server: ScriptedServer, start: StartAgent, tmp_path: Path
) -> None:
    Store(
        tmp_path / "state", limit_bytes=1 << 20, history_rounds=5, federation="elsewhere", device=DEVICE
    ).close()

    with refuses(StoreError, federation="elsewhere", device="phone"):
        start()


def test_an_agent_outlives_closed_output(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()

    def closed(_: AgentEvent) -> None:
        raise BrokenPipeError("stdout is closed")

    agent.report = closed
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    server.ack(server.update(2))
    assert agent.alive


def test_a_store_that_a_round_still_uses_is_not_closed(
    start: StartAgent, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl_device.agent._ROUND_END_S", 0.05)
    agent = start()
    server.hello()
    release = threading.Event()
    worker = threading.Thread(target=release.wait, daemon=True)
    worker.start()  # before the agent, which forgets one that is not alive, may see it
    agent.agent.rounds._thread = worker

    agent.stop()

    assert agent.agent.store.history() == []
    release.set()
    agent.agent.store.close()


def test_an_update_that_cannot_be_read_is_settled_like_any_other(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    store = store_of(tmp_path)
    data = b"\xc1 of another release"
    store.finish_job(Outgoing("run", 1, "old", data), None, "")
    store.close()
    agent = start()
    server.hello()

    digest = hashlib.sha256(data).hexdigest()
    ack = Ack(round=1, nonce="old", status="rejected", reason="malformed", sha256=digest)
    server.publish(server.mine.acks, messages.encode(ack))

    assert agent.event("rejected").details["round"] == 1
    server.open(world, number=2)
    assert server.update(2).nonce == "n2"


def test_an_agent_survives_a_broker_that_is_killed_and_comes_back_empty(
    own_mosquitto: Mosquitto,
    connect: SessionFactory,
    tmp_path: Path,
    limits: Limits,
    endless: World,
    world: World,
) -> None:
    session: Session = connect(own_mosquitto.address)
    server = ScriptedServer(session, "demo")
    agent = RunningAgent("demo", own_mosquitto.address, tmp_path, limits)
    server.open(endless)
    server.progress()

    own_mosquitto.kill()
    agent.event("offline")
    own_mosquitto.start()

    assert server.status().online
    server.open(world, number=2)
    assert server.update(2).nonce == "n2"
    agent.stop()
