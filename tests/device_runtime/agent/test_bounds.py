"""What a hostile server may ask of a device: it declines, says why, and takes the next round."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.messages import ProfileRequest
from edgefl_device.config import AgentEvent
from edgefl_device.policy import OwnerPolicy
from edgefl_device.round.job import decode_job, encode_job
from edgefl_device.store.database import Store
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import PATIENCE_S

BOMB = {"codec": "zstd", "raw": 1 << 30}


def test_a_gigabyte_manifest_is_not_fetched(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    honest = world.announcement()
    offer = honest.offers["onnx"]
    bundles = {tier: msgspec.structs.replace(ref, **BOMB) for tier, ref in offer.bundles.items()}
    bad = {"onnx": msgspec.structs.replace(offer, bundles=bundles)}
    server.publish_blobs(world)
    server.announce(msgspec.structs.replace(honest, offers=bad))
    server.assign(world.task())
    assert server.decline().reason == "no-memory"
    assert "its manifest" in agent.event("declined").text
    server.open(world, number=2)
    assert server.update(2).nonce == "n2"


def test_too_large_weights_are_not_fetched(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    honest = world.announcement()
    units = {
        name: tuple(msgspec.structs.replace(ref, **BOMB) for ref in refs)
        for name, refs in honest.units.items()
    }
    server.publish_blobs(world)
    server.announce(msgspec.structs.replace(honest, units=units))
    server.assign(world.task())
    assert server.decline().reason == "no-memory"
    assert "a blob of weights" in agent.event("declined").text


def test_a_graph_with_too_large_ports_is_not_loaded(server: ScriptedServer, start: StartAgent) -> None:
    bundle = tiny.make_bundle()
    first, *others = bundle.manifest.graphs
    port = msgspec.structs.replace(first.inputs[0], shape=(1 << 31, 1 << 31))
    graphs = (msgspec.structs.replace(first, inputs=(port, *first.inputs[1:])), *others)
    wrong = World(tiny.BundleArchive(msgspec.structs.replace(bundle.manifest, graphs=graphs), bundle.blobs))
    agent = start()
    server.open(wrong)
    assert agent.event("declined", "failed").event in ("declined", "failed") and agent.alive


def test_a_round_without_end_is_declined(server: ScriptedServer, start: StartAgent) -> None:
    bundle = tiny.make_bundle()
    phases = tuple(msgspec.structs.replace(p, steps=1 << 40) for p in bundle.manifest.phases)
    endless = World(tiny.BundleArchive(msgspec.structs.replace(bundle.manifest, phases=phases), bundle.blobs))
    agent = start()
    server.open(endless)
    assert server.decline().reason == "too-much-work"
    assert "local steps" in agent.event("declined").text


def test_records_are_stored(server: ScriptedServer, start: StartAgent, world: World, limits: Limits) -> None:
    blobs = sum(len(data) for data in world.blobs.values())
    start(limits=msgspec.structs.replace(limits, store_bytes=blobs))
    server.open(world)
    # The record takes the place of blobs that were used long ago, never more.
    assert server.update().nonce == "n1"


def test_a_policy_declines_with_its_reason(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start(policy=OwnerPolicy(train=False, profile=False))
    server.open(world)
    assert server.decline().reason == "policy"
    assert "train is false" in agent.event("declined").text
    server.session.subscribe([server.mine.profiles])
    request = ProfileRequest(nonce="ab" * 8, bundles={}, within_s=10.0)
    server.publish(server.mine.profile_requests, messages.encode(request))
    answer = server.profile_answer()
    assert (answer.state, answer.reason) == ("declined", "policy")


def test_a_round_that_ended_its_process_again_and_again_is_left(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path, limits: Limits
) -> None:
    first = _at_the_beginning(server, start, world, limits)
    first.stop()
    store = store_of(tmp_path)
    job = decode_job(store.job() or b"")
    assert job is not None and job.tries == 0, "it was stopped in good order"
    store.open_job(encode_job(msgspec.structs.replace(job, tries=limits.attempts)))
    store.close()
    start()
    server.open(world)
    assert server.decline().reason == "crashed"


def test_a_worker_that_ends_while_its_agent_stops_is_the_last(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path, limits: Limits
) -> None:
    agent = _at_the_beginning(server, start, world, limits)
    [worker] = [thread for thread in threading.enumerate() if thread.name == "round-1"]

    def stop_in_the_middle_of_a_turn(event: AgentEvent) -> None:
        agent.events.put(event)
        if event.event == "refused":  # on the agent's thread, which looks for a round to begin after it
            agent.agent.stop()
            agent.agent.fetcher.cancelled.set()
            worker.join(PATIENCE_S)

    agent.report = stop_in_the_middle_of_a_turn
    server.publish(server.mine.tasks, b"\xc1")
    assert agent.ended() is None and not worker.is_alive()
    seen = [agent.events.get_nowait().event for _ in range(agent.events.qsize())]
    assert seen.count("stopped") == 1
    store = store_of(tmp_path)
    job = decode_job(store.job() or b"")
    assert job is not None and job.tries == 0
    store.close()


def _at_the_beginning(
    server: ScriptedServer, start: StartAgent, world: World, limits: Limits
) -> RunningAgent:
    """An agent with a round of which nothing can be fetched."""
    agent = start(limits=msgspec.structs.replace(limits, fetch_timeout_s=60.0))
    server.hello()
    server.announce(world.announcement())
    server.assign(world.task())
    deadline = time.monotonic() + PATIENCE_S
    while agent.agent.store.job() is None:
        assert time.monotonic() < deadline, "no round was begun"
        time.sleep(0.001)
    return agent


def test_an_unreadable_update_is_dropped(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    store_of(tmp_path).close()
    with sqlite3.connect(tmp_path / "state" / "store.sqlite3") as db:
        db.execute("insert into outbox values('n0', 0, x'c1')")
    agent = start()
    assert "cannot be read" in agent.event("store").text
    server.open(world)
    assert server.update().nonce == "n1"


def store_with_an_unreadable_update(folder: Path) -> Path:
    """Of the task n1, which cannot be dropped until the trigger is."""
    store_of(folder).close()
    path = folder / "state" / "store.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute("insert into outbox values('n1', 0, x'c1')")
        db.execute("create trigger full before delete on outbox begin select raise(abort, 'full'); end")
    return path


def test_an_update_of_this_very_task_that_cannot_be_read_is_made_anew(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path, limits: Limits
) -> None:
    """The task is there before the row is dropped, and nothing comes of the server behind that."""
    path = store_with_an_unreadable_update(tmp_path)
    agent = start(limits=msgspec.structs.replace(limits, retry_pause_s=0.05))
    server.open(world)
    assert "full" in agent.event("store").text
    server.publish(server.mine.tasks, b"\xc1")
    assert agent.event("refused").event == "refused"  # what came before it was looked at
    with sqlite3.connect(path, timeout=30) as db:
        db.execute("drop trigger full")
    assert server.update().nonce == "n1"


def test_an_update_that_is_dropped_as_the_device_asks_for_it_is_made_anew(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox thread drops what it cannot read behind the question whether it waits, and before the next one."""
    path = store_with_an_unreadable_update(tmp_path)
    asked = Store.waits

    def dropped_behind(store: Store, nonce: str) -> bool:
        waits = asked(store, nonce)
        if waits:
            with sqlite3.connect(path, timeout=30) as db:
                db.execute("drop trigger if exists full")
                db.execute("delete from outbox")
        return waits

    monkeypatch.setattr(Store, "waits", dropped_behind)
    start()
    server.open(world)
    assert server.update().nonce == "n1"


def test_a_device_with_nothing_to_do_asks_its_store_once(
    server: ScriptedServer, start: StartAgent, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start()
    server.hello()
    asked: list[bytes | None] = []
    job = Store.job
    monkeypatch.setattr(Store, "job", lambda store: asked.append(job(store)) or asked[-1])
    server.announce(world.announcement())  # it has no task
    for spoiled in range(20):
        server.publish(server.mine.tasks, bytes([0xC1, spoiled]))
    server.assign(world.task())
    server.publish_blobs(world)
    assert server.update().nonce == "n1"
    assert len(asked) < 15 and agent.alive


FULL = "create trigger full before {what} begin select raise(abort, 'database or disk is full'); end"


@pytest.mark.parametrize("what", ["insert on job", "delete on job", "insert on history"])
def test_a_full_disk_ends_no_agent(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path, what: str
) -> None:
    agent = start()
    server.hello()
    path = tmp_path / "state" / "store.sqlite3"
    with sqlite3.connect(path, timeout=30) as db:
        db.execute(FULL.format(what=what))
    server.open(world)
    if what == "insert on history":
        server.ack(server.update())
    assert "disk is full" in agent.event("store", "failed").text
    with sqlite3.connect(path, timeout=30) as db:
        db.execute("drop trigger full")
    if what != "insert on history":
        assert server.update().nonce == "n1"
    else:
        server.ack(server.update())
        assert agent.event("accepted").event == "accepted"


def test_unwanted_messages_are_dropped(server: ScriptedServer, start: StartAgent, limits: Limits) -> None:
    agent = start()
    server.hello()
    for _ in range(1000):
        agent.agent.fetcher.deliver("chunk", b"x")
    assert agent.event("limited").details["dropped"] == 1000
