"""A device that puts its weights together from a keyframe and patches, in float16 and compressed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, compress, describe
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.patches import patch, patched
from edgefl.wire.tensors import Arrays
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.tiny import World
from tests.pairs import slow

NEW = {"head.w": tiny.weights()["head"]["head.w"] + np.float32(0.3)}


def patch_ref(world: World, old: Arrays, new: Arrays) -> BlobRef:
    return world.add(patch(old, new, set(new)) or b"")


def with_patches(world: World, *refs: BlobRef) -> Round:
    units = world.unit_refs | {"head": (*world.unit_refs["head"], *refs)}
    return msgspec.structs.replace(world.announcement(), units=units)


def assign(server: ScriptedServer, world: World, announced: Round) -> None:
    server.hello()
    server.publish_blobs(world)
    server.announce(announced)
    server.assign(world.task())


def test_agents_train_from_patched_weights(server: ScriptedServer, start: StartAgent, world: World) -> None:
    old = world.units["head"]
    first = patch_ref(world, old, NEW)
    between = patched(old, world.blobs[first.sha256])
    second = patch_ref(world, between, {"head.w": NEW["head.w"] * 2})
    start()
    assign(server, world, with_patches(world, first, second))
    update = server.update()

    world.units["head"] = patched(between, world.blobs[second.sha256])
    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)


def test_float16_is_trained_as_float32(server: ScriptedServer, start: StartAgent, world: World) -> None:
    half = {"head.w": world.units["head"]["head.w"].astype(np.float16)}
    world.unit_refs["head"] = (world.add(tensors.dump(half)),)
    start()
    assign(server, world, world.announcement())
    update = server.update()

    world.units["head"] = {"head.w": half["head.w"].astype(np.float32)}
    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    assert weights_of(update)["head.w"].dtype == np.float32
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["another shape", slow("nonsense"), "a zstd bomb"])
def test_a_corrupt_patch_fails_the_attempt_until_it_is_replaced(
    server: ScriptedServer, start: StartAgent, world: World, kind: str
) -> None:
    bad = {
        "another shape": tensors.dump({"head.w": np.zeros(2, np.int8), "/scales": np.ones(1, np.float32)}),
        "nonsense": b"nonsense",
        "a zstd bomb": compress(bytes(1 << 20), tiny.CHUNK)[1],
    }[kind]
    raw = 1000 if kind == "a zstd bomb" else 0
    publish_blob(server.session, server.topics, bad, tiny.CHUNK)
    agent = start()
    assign(server, world, with_patches(world, describe(bad, tiny.CHUNK, raw=raw)))
    reason = agent.event("failed").text
    assert ("claims 1048576 bytes" if raw else "patch does not fit the weights") in reason

    good = patch_ref(world, world.units["head"], NEW)
    server.publish_blobs(world)
    server.announce(with_patches(world, good))

    assert server.update().nonce == "n1"
