"""A device told in advance what a bundle needs: what does not fit is declined before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import Bundle
from edgefl_device.store.database import DECLINED
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.tiny import World

OFFERED = 1 << 30
"""What the scripted device offers."""


def planned(train_bytes: int) -> World:
    """A round whose training step is known to need so many bytes, and every other graph one."""
    bundle = tiny.make_bundle()
    graphs = tuple(
        msgspec.structs.replace(graph, planned_bytes=train_bytes if graph.name == "train" else 1)
        for graph in bundle.manifest.graphs
    )
    return World(Bundle(msgspec.structs.replace(bundle.manifest, graphs=graphs), bundle.blobs))


def test_a_too_large_bundle_is_declined(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    agent = start()
    server.open(planned(3 << 29))

    decline = server.decline()

    assert (decline.round, decline.nonce, decline.reason) == (1, "n1", "no-memory")
    said = agent.event("round", "declined")
    assert said.event == "declined"
    assert "graph 'train' of tier 'weak' needs 1536.0 MiB, and this device offers 1024.0 MiB" in said.text
    agent.stop()
    assert [(past.outcome, past.reason) for past in store_of(tmp_path).history()] == [(DECLINED, "no-memory")]


def test_only_the_manifest_is_fetched_then(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    agent, world = start(), planned(3 << 29)
    server.open(world)
    server.decline()
    agent.stop()

    store = store_of(tmp_path)
    kept = [data for data in world.blobs.values() if store.blob(describe(data, tiny.CHUNK))]

    assert kept == [world.bundle.encoded]


@pytest.mark.parametrize("needed", [0, OFFERED])
def test_a_bundle_that_just_fits_is_trained(server: ScriptedServer, start: StartAgent, needed: int) -> None:
    start()
    server.open(planned(needed))

    assert server.update().samples == tiny.ROWS


def test_a_round_that_takes_more_than_planned_is_told(server: ScriptedServer, start: StartAgent) -> None:
    agent = start()
    server.open(planned(1))

    assert (profile := server.update().profile).peak_bytes > profile.idle_bytes
    assert ", tier 'weak' is planned at 0.0 MiB; offer less memory" in agent.event("memory").text


def test_a_graph_outside_rounds_needs_no_memory(server: ScriptedServer, start: StartAgent) -> None:
    world = planned(1)
    manifest = world.bundle.manifest
    large = msgspec.structs.replace(manifest.graph("start"), name="evaluate", planned_bytes=OFFERED + 1)
    manifest = msgspec.structs.replace(manifest, graphs=(*manifest.graphs, large), evaluate="evaluate")
    assert large not in manifest.of_round and len(manifest.of_round) == len(manifest.graphs) - 1
    start()
    server.open(World(Bundle(manifest, world.bundle.blobs)))

    assert server.update().samples == tiny.ROWS


def test_the_next_round_is_taken_when_it_fits(server: ScriptedServer, start: StartAgent) -> None:
    start()
    server.open(planned(3 << 29))
    server.decline()

    server.open(planned(1 << 20), number=2)

    assert server.update(2).round == 2
