"""A whole device between rounds: what it takes up, what it drops aloud, and the task that it declines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.mqtt.messages import Decline
from edgefl_device.round.job import encode_job
from edgefl_device.store.database import DECLINED
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer, weights_of
from tests.device_runtime.tiny import World


def world_with(*, without_carry: bool = False, **changes: object) -> World:
    """The tiny round, its manifest changed; ``without_carry``: its start begins from the weights alone."""
    bundle = tiny.make_bundle()
    blobs, graphs = dict(bundle.blobs), bundle.manifest.graphs
    if without_carry:
        old = bundle.manifest.graph("start")
        inputs = tuple(port for port in old.inputs if port.role != "carry")
        nodes = [
            tiny.node("Identity", "weights.head.w", f"out.{tiny.W.name}"),
            tiny.node("Sub", "weights.head.w weights.head.w", f"out.{tiny.V.name}"),
            tiny.node("Identity", "zero", f"out.{tiny.COUNT.name}"),
        ]
        data = tiny.onnx_bytes(nodes, inputs, old.outputs, ["zero"])
        start = tiny.graph_of("start", data, inputs, old.outputs)
        blobs[start.blob.sha256] = data
        graphs = tuple(start if graph.name == "start" else graph for graph in graphs)
    return World(Bundle(msgspec.structs.replace(bundle.manifest, graphs=graphs, **changes), blobs))


def needing(**changes: object) -> World:
    return world_with(carry_needed=True, **changes)


def play(server: ScriptedServer, agent: RunningAgent, world: World, number: int, base: int) -> tiny.Array:
    """One round from its announcement to its acknowledgement; the trained weights."""
    server.open(world, number=number, base=base)
    update = server.update(number)
    server.ack(update)
    agent.event("accepted")
    return weights_of(update)["head.w"]


def trained(world: World, carry: tiny.Array | None = None) -> tuple[tiny.Array, tiny.Array]:
    weights, left, _ = tiny.expected_round(world, world.job(), tiny.ROWS, carry)
    return weights, left


# -- taken up, or dropped aloud ---------------------------------------------------------------------------------


def test_after_an_abandoned_round_the_last_goes_on(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    play(server, agent, world, 1, base=0)
    play(server, agent, world, 2, base=1)

    again = play(server, agent, world, 3, base=1)

    _, left = trained(world)
    np.testing.assert_allclose(again, trained(world, left)[0], rtol=1e-5)


def test_an_abandoned_carry_is_dropped_aloud(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    play(server, agent, world, 1, base=0)

    server.announce(world.announcement(number=2, base=0))

    told = agent.event("carry")
    assert (told.details["round"], told.details["run"]) == (1, "run")
    assert "round 1 was abandoned" in told.text


def test_a_carry_too_old_is_dropped_aloud(server: ScriptedServer, start: StartAgent) -> None:
    world = world_with(carry_exchanges=1)
    agent = start()
    play(server, agent, world, 1, base=0)

    later = play(server, agent, world, 3, base=2)

    np.testing.assert_allclose(later, trained(world)[0], rtol=1e-5)
    assert agent.agent.store.carries()[0].round == 3


def test_what_another_run_left_is_dropped_with_a_word(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    server.open(world, run="earlier", base=0)
    server.ack(server.update())
    agent.event("accepted")

    server.open(world, number=2, base=1)

    assert "earlier" in agent.event("carry").text
    np.testing.assert_allclose(weights_of(server.update(2))["head.w"], trained(world)[0], rtol=1e-5)


def test_a_job_of_a_killed_process_takes_up_the_carry_that_it_began_with(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    play(server, agent, world, 1, base=0)
    agent.stop()
    store = store_of(tmp_path)
    job = msgspec.structs.replace(world.job(), round=2, nonce="n2", base=1)
    store.open_job(encode_job(job))
    store.close()

    start()
    server.open(world, number=2, base=1)

    _, left = trained(world)
    np.testing.assert_allclose(weights_of(server.update(2))["head.w"], trained(world, left)[0], rtol=1e-5)


# -- declined -----------------------------------------------------------------------------------------------------


def test_a_device_without_needed_carry_declines(
    server: ScriptedServer, start: StartAgent, tmp_path: Path
) -> None:
    agent = start()
    server.open(needing(), number=4, base=3)

    decline = server.decline()

    assert (decline.round, decline.nonce, decline.reason) == (4, "n4", "no-carry")
    said = agent.event("round", "declined")
    assert said.event == "declined" and "noisy-sgd" in said.text
    agent.stop()
    store = store_of(tmp_path)
    assert store.job() is None
    assert [(past.outcome, past.reason) for past in store.history()] == [(DECLINED, "no-carry")]


def test_the_same_task_is_declined_again_unread(server: ScriptedServer, start: StartAgent) -> None:
    agent, world = start(), needing()
    server.open(world, number=4, base=3)
    first = server.decline()

    server.assign(world.task(number=4))

    assert server.decline() == first
    assert agent.event("round", "declined").event == "declined"
    server.open(world_with(), number=5, base=3)
    assert agent.event("round", "declined").event == "round"


def test_restarted_servers_and_devices_hear_the_decline(server: ScriptedServer, start: StartAgent) -> None:
    agent, world = start(), needing()
    server.open(world, number=4, base=3)
    first = server.decline()
    server.announce(world.announcement(number=4, base=3))
    assert server.decline() == first

    agent.stop()
    again = start()

    assert server.decline() == first
    again.stop()
    seen = [again.events.get_nowait().event for _ in range(again.events.qsize())]
    assert "online" in seen and not {"round", "declined"} & set(seen)


def test_a_killed_device_declines_later(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    world = needing()
    store = store_of(tmp_path)
    store.open_job(encode_job(msgspec.structs.replace(world.job(), round=4, nonce="n4", base=3)))
    store.close()

    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(world.announcement(number=4, base=3))

    assert server.decline().nonce == "n4"


def test_a_decline_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from edgefl_device.store.database import *;"
        "s = Store(Path(sys.argv[1]), limit_bytes=1000, history_rounds=5); s.open_job(b'job');"
        "s.decline(PastRound(run='run', round=4, tier='weak', nonce='n4', outcome=DECLINED, reason='no-carry'));"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "state")], check=False, timeout=300, env=environment
    )

    store = store_of(tmp_path)

    assert ended.returncode == -9
    assert store.job() is None
    assert [past.nonce for past in store.declined("run", 4)] == ["n4"]
    store.close()


def test_an_exchange_without_carry_prepares_the_next(server: ScriptedServer, start: StartAgent) -> None:
    """A method's opening exchange makes what the others need."""
    agent = start()
    opening, later = needing(without_carry=True, carry_exchanges=1), needing(carry_exchanges=1)
    _, left = trained(opening)

    play(server, agent, opening, 1, base=0)
    second = play(server, agent, later, 2, base=1)

    np.testing.assert_allclose(second, trained(later, left)[0], rtol=1e-5)
    server.open(later, number=4, base=3)
    assert server.decline() == Decline(round=4, nonce="n4", reason="no-carry")
    assert agent.event("declined").text.endswith(
        "algorithm 'noisy-sgd' continues from an earlier round, and this device has nothing that "
        "round 4 can continue from: it was good for 1 completed round after it, and round 3 is completed"
    )
