"""Which of a round's bundles a device takes, and what it says where none is for its engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.errors import ConfigError
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.mqtt.messages import Offer, Round
from edgefl_device.personal.readonly_client import job_of
from edgefl_device.round.job import Job
from edgefl_device.store.database import DECLINED
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.tiny import World

PHONES = describe(b"for phones", 8)
FOR_PHONES = {"executorch": Offer(bundles={"weak": PHONES}, signatures={"weak": b"signed"})}


def also_in_executorch(announced: Round) -> Round:
    return msgspec.structs.replace(announced, offers=announced.offers | FOR_PHONES)


def only_in_executorch(announced: Round) -> Round:
    return msgspec.structs.replace(announced, offers=FOR_PHONES)


@pytest.mark.parametrize("format", ["onnx", "executorch"])
def test_a_job_has_the_bundle_and_signature_of_its_engines_format(world: World, format: str) -> None:
    announced = also_in_executorch(world.announcement())

    job = Job.of(world.task(), announced, format)

    assert job is not None and job.format == format
    wanted = {"onnx": (world.bundle_ref, b""), "executorch": (PHONES, b"signed")}
    assert (job.bundle, job.signature) == wanted[format]
    guest = job_of(announced, "weak", format)
    assert (guest.bundle, guest.signature, guest.format) == (*wanted[format], format)


def test_a_tier_that_is_offered_in_no_format_is_no_job(world: World) -> None:
    assert Job.of(world.task(), msgspec.structs.replace(world.announcement(), offers={}), "onnx") is None


def test_a_device_started_again_with_another_engine_begins_its_job_anew(world: World) -> None:
    announced = also_in_executorch(world.announcement())
    before = Job.of(world.task(), announced, "onnx")
    assert before is not None

    now = before.following(announced, "executorch")

    assert now is not None and (now.nonce, now.format) == (before.nonce, "executorch")
    assert now.content != before.content


def test_a_guest_is_told_in_which_formats_there_is_a_model(world: World) -> None:
    announced = only_in_executorch(world.announcement())

    with pytest.raises(
        ConfigError, match=r"nothing in format onnx, but in executorch: choose another `engine`"
    ):
        job_of(announced, "weak", "onnx")
    with pytest.raises(ConfigError, match=r"no tier 'strong' in format executorch: choose one of weak"):
        job_of(announced, "strong", "executorch")


def test_a_device_takes_its_format_of_two(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(also_in_executorch(world.announcement()))
    server.assign(world.task())

    assert weights_of(server.update()).keys() == {"head.w"}


def test_a_device_declines_what_its_engine_cannot_run(
    server: ScriptedServer, start: StartAgent, tmp_path: Path, world: World
) -> None:
    agent = start()
    server.hello()
    server.publish_blobs(world)
    server.announce(only_in_executorch(world.announcement(number=4)))
    server.assign(world.task(number=4))

    decline = server.decline()

    assert (decline.round, decline.nonce, decline.reason) == (4, "n4", "no-format")
    said = agent.event("round", "declined", "failed")
    assert said.event == "declined"
    assert "offered in format executorch" in said.text and "engine runs onnx" in said.text
    assert 'formats = ["executorch", "onnx"] in [export]' in said.text
    server.announce(also_in_executorch(world.announcement(number=5)))
    server.assign(world.task(number=5))
    assert server.update(5).round == 5
    agent.stop()
    outcomes = [(past.outcome, past.reason) for past in store_of(tmp_path).history()]
    assert (DECLINED, "no-format") in outcomes


def test_bundles_for_newer_runtimes_fail(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    bundle, agent = tiny.make_bundle(), start()
    graphs = [msgspec.structs.replace(each, least_runtime="999.1") for each in bundle.manifest.graphs]
    manifest = msgspec.structs.replace(bundle.manifest, graphs=tuple(graphs))
    world = World(Bundle(manifest, bundle.blobs))
    server.open(world)

    assert server.decline().reason == "no-format"

    said = agent.event("round", "declined").text
    assert "expected onnxruntime 999.1 or newer for tier 'weak', found" in said
    assert 'install it by `pip install "onnxruntime>=999.1"`' in said
    agent.stop()
    store = store_of(tmp_path)
    assert [each for each in world.blobs.values() if store.blob(describe(each, tiny.CHUNK))] == [
        world.bundle.encoded
    ]
