"""The agent against a real broker: one round from hello to acknowledgement, and everything that may interfere."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime import job as jobs
from device_runtime.agent import Agent, AgentConfig, AgentEvent
from device_runtime.engine.onnx import OnnxEngine
from device_runtime.store import Outgoing, Store
from edgefl.wire import messages
from edgefl.wire.errors import DataError, StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.messages import Ack, Round, Status
from edgefl.wire.session import Address, Session
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory, on_both_brokers
from tests.device_runtime import tiny
from tests.device_runtime.scripted import DEVICE, RunningAgent, ScriptedServer, weights_of, write_data
from tests.device_runtime.tiny import World

LONG = 1_000_000

StartAgent = Callable[..., RunningAgent]


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


def store_of(folder: Path) -> Store:
    return Store(folder / "state", limit_bytes=1 << 20, history_rounds=5)


# -- a round ---------------------------------------------------------------------------------------------------


@on_both_brokers
def test_the_agent_says_that_it_is_online_and_what_it_is(server: ScriptedServer, start: StartAgent) -> None:
    start()

    assert server.status().online
    hello = server.hello()
    assert (hello.samples, hello.tier, hello.memory_bytes) == (tiny.ROWS, "weak", 1 << 30)
    assert set(hello.engines) == {"onnxruntime"}
    assert hello.cores >= 1


@on_both_brokers
def test_one_round_from_announcement_to_history(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    server.open(world)

    update = server.update()
    server.ack(update)

    assert agent.event("accepted").details["round"] == 1
    expected, _, loss = tiny.expected_round(world, world.job(), tiny.ROWS)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)
    assert update.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert (update.run, update.round, update.nonce, update.tier) == ("run", 1, "n1", "weak")
    assert (update.device, update.model_version, update.samples) == ("phone", "v1", tiny.ROWS)
    assert update.profile.down_bytes == sum(len(data) for data in _used(world))
    assert update.profile.peak_bytes >= update.profile.idle_bytes > 0
    agent.stop()
    past = store_of(tmp_path).history()
    assert [(entry.round, entry.outcome) for entry in past] == [(1, "accepted")]


def _used(world: World) -> list[bytes]:
    graphs = {graph.name: graph.blob.sha256 for graph in world.bundle.manifest.graphs}
    names = {*graphs.values(), *(ref.sha256 for ref in world.unit_refs.values()), world.bundle_ref.sha256}
    return [world.blobs[name] for name in names]


@pytest.mark.parametrize("task_first", [True, False])
def test_task_and_announcement_may_come_in_any_order(
    server: ScriptedServer, start: StartAgent, world: World, task_first: bool
) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    steps = [lambda: server.announce(world.announcement()), lambda: server.assign(world.task())]
    for step in reversed(steps) if task_first else steps:
        step()

    assert server.update().nonce == "n1"


def test_progress_is_told_on_the_way(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.open(world)

    progress = server.progress(least=6)

    assert (progress.round, progress.tier, progress.step, progress.steps) == (1, "weak", 6, 6)
    assert progress.down_bytes > 0


@on_both_brokers
def test_the_next_round_gets_the_carry_of_this_one(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    start()
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    update = server.update(2)

    _, carry, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS, carry)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)


def test_a_second_round_fetches_no_graph_again(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    start()
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    assert server.update(2).profile.down_bytes == 0


def test_an_agent_that_waits_for_the_end_ends_with_the_training(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start(until_done=True)
    server.open(world)
    server.ack(server.update())
    agent.event("accepted")

    server.announce(world.announcement(state="done"))

    assert agent.ended() is None
    assert not server.status(lambda status: not status.online).online


# -- duplicates and rounds that end ----------------------------------------------------------------------------


def test_a_task_that_is_done_is_not_done_again(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    server.open(world)
    server.ack(server.update())
    agent.event("accepted")

    server.assign(world.task())
    server.open(world, number=2)

    assert agent.event("round").details["round"] == 2


def test_a_task_that_comes_again_while_its_update_waits_sends_the_update_again(
    server: ScriptedServer, start: StartAgent, world: World, limits: Limits
) -> None:
    agent = start(limits=msgspec.structs.replace(limits, ack_timeout_s=1000.0))
    server.open(world)
    first = server.update()

    server.assign(world.task())

    assert server.update() == first
    server.ack(first)
    assert agent.event("round", "accepted").event == "round"
    assert agent.event("round", "accepted").event == "accepted"


def test_a_rejected_update_is_told_and_remembered(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    server.open(world)

    server.ack(server.update(), "rejected", "closed-round")

    assert agent.event("rejected").details["round"] == 1
    agent.stop()
    assert [(past.outcome, past.reason) for past in store_of(tmp_path).history()] == [
        ("rejected", "closed-round")
    ]


@pytest.mark.parametrize(
    "change", [{"state": "closed"}, {"state": "done"}, {"number": 2}, {"run": "another"}], ids=str
)
def test_work_on_a_round_that_is_over_is_dropped(
    server: ScriptedServer,
    start: StartAgent,
    world: World,
    endless: World,
    tmp_path: Path,
    change: dict[str, object],
) -> None:
    agent = start()
    server.open(endless)
    server.progress()

    server.announce(endless.announcement(**change))  # type: ignore[arg-type]

    assert agent.event("aborted").details["round"] == 1
    server.open(world, number=3, run="next")
    assert server.update(3).run == "next"
    agent.stop()
    assert store_of(tmp_path).job() is None


def test_a_task_of_another_run_is_left_alone(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    server.publish_blobs(world)
    server.announce(world.announcement())
    server.assign(world.task(run="another", nonce="wrong"))
    server.assign(world.task())

    assert server.update().nonce == "n1"
    assert agent.alive


def test_a_task_for_a_tier_that_is_not_offered_is_left_alone(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(world.announcement())
    server.assign(msgspec.structs.replace(world.task(nonce="wrong"), tier="mighty"))
    server.assign(world.task())

    assert server.update().nonce == "n1"


# -- stopped and started again ---------------------------------------------------------------------------------


@on_both_brokers
def test_an_agent_started_again_takes_the_round_up_where_it_was(
    server: ScriptedServer, start: StartAgent, endless: World, tmp_path: Path
) -> None:
    agent = start()
    server.open(endless)
    server.progress()
    agent.stop()
    store = store_of(tmp_path)
    saved = store.checkpoint("n1")
    store.close()
    assert saved is not None
    assert saved.step > 0

    start()

    assert server.progress().step > saved.step


@on_both_brokers
def test_an_update_that_was_not_acknowledged_is_sent_by_the_next_process(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
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
    announced = msgspec.structs.replace(announced, signatures={"weak": b"another key"})
    announced.units["mid"] = msgspec.structs.replace(announced.units["mid"], chunk=1 << 20, digests=b"")
    store = store_of(tmp_path)
    assert store.checkpoint("n1") is not None
    store.close()
    offline = offline_agent(tmp_path, announced)

    job = offline._kept_job()

    assert job == msgspec.structs.replace(
        old, bundle=announced.bundles["weak"], units=announced.units, signature=b"another key"
    )
    kept = offline._store.job()
    assert kept is not None
    assert jobs.decode(kept) == job
    assert (offline._store.checkpoint("n1") is not None) == same_model
    offline._store.close()


def offline_agent(folder: Path, announced: Round | None = None) -> Agent:
    """An agent on the store of the one before, that never connects."""
    config = AgentConfig(
        federation=federation_of(folder),
        device=DEVICE,
        broker=Address("127.0.0.1", 1),
        data=write_data(folder),
        folder=folder / "state",
    )
    agent = Agent(config, OnnxEngine(), lambda _: None)
    agent._announced = announced
    return agent


def federation_of(folder: Path) -> str:
    with sqlite3.connect(folder / "state" / "store.sqlite3") as db:
        found: str = db.execute("SELECT value FROM owner WHERE name = 'federation'").fetchone()[0]
    return found


def test_a_store_of_another_federation_is_refused_before_anything_is_published(
    server: ScriptedServer, start: StartAgent, tmp_path: Path
) -> None:
    Store(
        tmp_path / "state", limit_bytes=1 << 20, history_rounds=5, federation="elsewhere", device=DEVICE
    ).close()

    with pytest.raises(StoreError, match="federation elsewhere"):
        start()


def test_an_agent_whose_output_is_closed_goes_on(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()

    def closed(_: AgentEvent) -> None:
        raise BrokenPipeError("stdout is closed")

    agent.agent._report = closed
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    server.ack(server.update(2))
    assert agent.alive


def test_a_store_that_a_round_still_uses_is_not_closed(
    start: StartAgent, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device_runtime.agent._WORKER_END_S", 0.05)
    agent = start()
    server.hello()
    release = threading.Event()
    agent.agent._worker = threading.Thread(target=release.wait, daemon=True)
    agent.agent._worker.start()

    agent.stop()

    assert agent.agent._store.history() == []
    release.set()
    agent.agent._store.close()


def test_an_update_that_cannot_be_read_is_settled_like_any_other(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    store = store_of(tmp_path)
    store.finish_job(Outgoing("run", 1, "old", b"\xc1 of another release"), None, "")
    store.close()
    agent = start()
    server.hello()

    ack = Ack(round=1, nonce="old", status="rejected", reason="malformed")
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


# -- bad input -------------------------------------------------------------------------------------------------

GARBAGE = [
    b"\xc1",
    b"not msgpack",
    b"\x80",
    messages.encode(Status(online=True)),
    b"\x81\xa1v\x02",
    b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01",
    b"\x81\xa5round\xa1\xff",
    b"\x00" * 100_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda data: data[:12].hex())
def test_garbage_on_every_topic_is_refused_and_the_agent_goes_on(
    server: ScriptedServer, start: StartAgent, world: World, garbage: bytes
) -> None:
    agent = start()
    server.hello()
    for topic in (server.topics.current_round, server.mine.tasks, server.mine.acks):
        server.publish(topic, garbage)
        assert f"ignored a message on {topic}" in agent.event("refused").text

    server.open(world)

    assert server.update().nonce == "n1"


def test_an_empty_message_is_no_message(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    for topic in (server.topics.current_round, server.mine.tasks, server.mine.acks):
        server.publish(topic, b"", retain=True)
    server.open(world)

    assert server.update().nonce == "n1"
    assert agent.event("refused", "round").event == "round"


@on_both_brokers
def test_a_damaged_chunk_fails_the_attempt_and_the_next_succeeds_once_it_is_mended(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    server.hello()
    damaged = server.topics.blob_chunk(world.unit_refs["mid"].sha256, 0)
    server.publish_blobs(world)
    server.publish(damaged, b"damaged", retain=True)
    server.announce(world.announcement())
    server.assign(world.task())
    assert "wrong digest" in agent.event("failed").text

    server.publish_blobs(world)

    assert server.update().nonce == "n1"


def test_a_bundle_for_another_engine_fails_the_attempt_with_both_formats(
    server: ScriptedServer, start: StartAgent
) -> None:
    bundle = tiny.make_bundle()
    graphs = tuple(msgspec.structs.replace(graph, format="executorch") for graph in bundle.manifest.graphs)
    world = World(tiny.Bundle(msgspec.structs.replace(bundle.manifest, graphs=graphs), bundle.blobs))
    agent = start()

    server.open(world)

    assert "holds ['executorch'] graphs, this device runs onnx" in agent.event("failed").text
    assert agent.alive


def test_weights_of_another_shape_fail_the_attempt_and_not_the_agent(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    wrong = World(tiny.make_bundle(), tiny.weights() | {"head": {"head.w": np.zeros((5, 1), np.float32)}})
    agent = start()
    server.open(wrong)
    assert "should be float32 (3, 1), found float32 (5, 1)" in agent.event("failed").text

    server.open(world, number=2)

    assert server.update(2).nonce == "n2"


def test_data_that_do_not_fit_the_model_end_the_agent_with_the_numbers(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 9), np.float32), y=np.zeros(4, np.int64))
    agent = start(data=tmp_path / "wide.npz")

    server.open(world)

    error = agent.ended()
    assert isinstance(error, DataError)
    assert "shape (9,), the model takes (3,)" in error.message
    assert not server.status(lambda status: not status.online).online


def test_data_that_cannot_be_read_are_refused_before_anything_is_published(
    start: StartAgent, tmp_path: Path
) -> None:
    with pytest.raises(DataError):
        start(data=tmp_path / "nowhere.npz")


@on_both_brokers
def test_an_agent_that_stops_is_offline_for_everybody_who_asks_later(
    server: ScriptedServer, start: StartAgent, tmp_path: Path
) -> None:
    agent = start(data=write_data(tmp_path, 5))
    assert server.status().online

    agent.stop()

    assert not server.status(lambda status: not status.online).online
