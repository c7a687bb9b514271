"""The agent against a real broker: one round from hello to acknowledgement, and everything that may interfere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.limits import Limits
from tests.conftest import on_each_broker
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.tiny import World
from tests.pairs import slow
from tests.wire.mqtt.events import PATIENCE_S

# -- a round ---------------------------------------------------------------------------------------------------


def test_the_agent_says_that_it_is_online_and_what_it_is(server: ScriptedServer, start: StartAgent) -> None:
    start()

    assert server.status().online
    hello = server.hello()
    assert (hello.samples, hello.tier, hello.memory_bytes) == (tiny.ROWS, "weak", 1 << 30)
    assert set(hello.engines) == {"onnxruntime"}
    assert hello.cores >= 1


@on_each_broker
def test_a_round_to_history(server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path) -> None:
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


def test_a_device_waits_for_no_clock_between_its_work_and_its_next_move(
    server: ScriptedServer, start: StartAgent, world: World, endless: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a round's work, the server's last word and the order to stop each wake it."""
    monkeypatch.setattr("edgefl_device.agent._POLL_S", 10 * PATIENCE_S)
    agent = start(until_done=True)
    server.open(endless)
    server.progress()
    server.open(world, number=3, run="next")  # what is worked on has to end first
    update = server.update(3)
    server.announce(world.announcement(number=3, run="next", state="done"))
    server.ack(update)
    assert agent.ended() is None

    stopped = start()
    stopped.event("online")
    stopped.stop()


def _used(world: World) -> list[bytes]:
    graphs = {graph.name: graph.blob.sha256 for graph in world.bundle.manifest.graphs}
    names = {
        *graphs.values(),
        *(ref.sha256 for refs in world.unit_refs.values() for ref in refs),
        world.bundle_ref.sha256,
    }
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


def test_the_next_round_gets_this_carry(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    update = server.update(2)

    _, carry, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS, carry)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)


def test_a_second_round_fetches_no_graph(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.open(world)
    server.ack(server.update())
    server.open(world, number=2)

    assert server.update(2).profile.down_bytes == 0


def test_an_agent_ends_with_the_training(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start(until_done=True)
    server.open(world)
    server.ack(server.update())
    agent.event("accepted")

    server.announce(world.announcement(state="done"))

    assert agent.ended() is None
    assert not server.status(lambda status: not status.online).online


# -- duplicates and rounds that end ----------------------------------------------------------------------------


def test_a_finished_task_is_not_repeated(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.open(world)
    server.ack(server.update())
    agent.event("accepted")

    server.assign(world.task())
    server.open(world, number=2)

    assert agent.event("round").details["round"] == 2


def test_a_repeated_task_sends_the_waiting_update_again(
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
    "change", [{"state": "closed"}, slow({"state": "done"}), {"number": 2}, slow({"run": "another"})], ids=str
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


def test_a_task_for_a_missing_tier_is_left(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(world.announcement())
    server.assign(msgspec.structs.replace(world.task(nonce="wrong"), tier="mighty"))
    server.assign(world.task())

    assert server.update().nonce == "n1"
