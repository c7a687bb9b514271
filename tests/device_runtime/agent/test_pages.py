"""An agent whose rounds are announced in pages, and whose blobs lie at mirrors: the same updates as ever."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, compress, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.patches import apply_patch, make_patch
from edgefl.wire.tensors import Arrays
from edgefl_device.personal.readonly_client import ReadOnlyClient
from tests.conftest import BrokerProcess
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.tiny import World
from tests.mirror.hostile import ScriptedMirror, Talk
from tests.pairs import slow


def paged(server: ScriptedServer, whole: Round, *, published: bool = True) -> Round:
    """The head of ``whole``; its page is at the broker unless it is not ``published``."""
    ref = describe(whole.page, tiny.CHUNK)
    if published:
        publish_blob(server.session, server.topics, whole.page, tiny.CHUNK)
    return whole.paged(ref)


def test_a_round_in_pages_is_trained_alike(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.open(world)
    plain = server.update()
    server.ack(plain)
    whole = world.announcement(number=2)
    server.announce(paged(server, whole))
    server.assign(world.task(number=2))
    update = server.update(2)
    server.ack(update)
    server.announce(paged(server, msgspec.structs.replace(whole, state="closed")))
    server.announce(paged(server, world.announcement(number=3)))
    server.assign(world.task(number=3))
    server.update(3)

    assert update.round == 2
    for name, array in weights_of(plain).items():
        assert array.shape == weights_of(update)[name].shape and np.isfinite(weights_of(update)[name]).all()


def test_a_missing_page_is_asked_for_again(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    whole = world.announcement()
    server.announce(paged(server, whole, published=False))
    server.assign(world.task())
    failed = server.failed()
    assert (failed.round, failed.tier) == (1, "weak") and "no good chunk" in failed.stage
    publish_blob(server.session, server.topics, whole.page, tiny.CHUNK)
    assert server.update().round == 1


def test_a_page_that_is_no_page_or_too_large_starts_nothing(
    server: ScriptedServer, start: StartAgent, world: World, limits: Limits
) -> None:
    agent = start(limits=msgspec.structs.replace(limits, max_manifest_bytes=16_000))
    server.hello()
    server.publish_blobs(world)
    junk, huge = b"\xc1junk", describe(bytes(16_001), tiny.CHUNK)
    ref = publish_blob(server.session, server.topics, junk, tiny.CHUNK)
    server.announce(world.announcement().paged(ref))
    server.assign(world.task())
    assert server.failed().stage == "failed: bundle"
    assert "malformed" in agent.event("failed").text
    server.announce(world.announcement().paged(huge))
    while "more than this device reads" not in agent.event("failed").text:
        pass
    server.announce(world.announcement())
    assert server.update().round == 1
    assert agent.alive


def test_one_without_a_task_reads_no_page(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    server.announce(paged(server, world.announcement(), published=False))
    server.announce(msgspec.structs.replace(world.announcement(), state="done"))
    agent.event("done")
    assert agent.agent.fetcher.fetches == 0


def test_all_of_a_round_comes_by_a_mirror(server: ScriptedServer, start: StartAgent, world: World) -> None:
    whole = world.announcement()
    blobs = {describe(data, tiny.CHUNK).sha256: data for data in (*world.blobs.values(), whole.page)}

    def answer(talk: Talk) -> None:
        talk.good(blobs[talk.path[1:]])

    with ScriptedMirror(answer, kept=True) as mirror:
        start()
        server.hello()
        head = whole.paged(describe(whole.page, tiny.CHUNK))
        server.announce(msgspec.structs.replace(head, mirrors=(mirror.url,), mirrors_only=True))
        server.assign(world.task())
        profile = server.update().profile

    assert (profile.down_bytes, profile.down_wire_bytes) == (0, 0)
    assert profile.mirror_bytes == sum(len(blobs[talk.path[1:]]) for talk in mirror.asked)
    assert len({talk.path for talk in mirror.asked}) == len(mirror.asked) > 3


def test_a_guest_reads_pages_too(
    server: ScriptedServer,
    world: World,
    broker: BrokerProcess,
    federation: str,
    tmp_path: Path,
    limits: Limits,
) -> None:
    whole = world.announcement()
    head = paged(server, whole, published=False)
    with ScriptedMirror(lambda talk: talk.good(whole.page)) as mirror:
        server.announce(msgspec.structs.replace(head, mirrors=(mirror.url,)))
        with ReadOnlyClient(federation, "guest", broker.address, tmp_path / "guest", limits) as guest:
            found = guest.announced()

    assert msgspec.structs.replace(found, v=1, mirrors=()) == whole
    assert len(mirror.asked) == 1


# -- A device that puts its weights together from a keyframe and patches, in float16 and compressed --------


NEW = {"head.w": tiny.weights()["head"]["head.w"] + np.float32(0.3)}


def patch_ref(world: World, old: Arrays, new: Arrays) -> BlobRef:
    return world.add(make_patch(old, new, set(new)) or b"")


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
    between = apply_patch(old, world.blobs[first.sha256])
    second = patch_ref(world, between, {"head.w": NEW["head.w"] * 2})
    start()
    assign(server, world, with_patches(world, first, second))
    update = server.update()

    world.units["head"] = apply_patch(between, world.blobs[second.sha256])
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
