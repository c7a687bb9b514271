"""Which of a round's bundles a device takes, and what it says where none is for its engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.data.text.vocabulary import words
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.readers import Reader, TableSpec, TextSpec
from edgefl.wire.mqtt.messages import Offer, Round
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.personal.readonly_client import job_of
from edgefl_device.round.job import Job
from edgefl_device.round.offline import train_round
from edgefl_device.store.database import DECLINED
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.data.files import written
from tests.device_runtime.tiny import World
from tests.support.errors import ConfigError, refuses

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

    with refuses(ConfigError, format="onnx", offered=["executorch"]):
        job_of(announced, "weak", "onnx")
    with refuses(ConfigError, tier="strong", offered=["weak"]):
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
    world = World(BundleArchive(manifest, bundle.blobs))
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


# -- A device told in advance what a bundle needs --------------------------------------------------------------


OFFERED = 1 << 30
"""What the scripted device offers."""


def planned(train_bytes: int) -> World:
    """A round whose training step is known to need so many bytes, and every other graph one."""
    bundle = tiny.make_bundle()
    graphs = tuple(
        msgspec.structs.replace(graph, planned_bytes=train_bytes if graph.name == "train" else 1)
        for graph in bundle.manifest.graphs
    )
    return World(BundleArchive(msgspec.structs.replace(bundle.manifest, graphs=graphs), bundle.blobs))


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
    server.open(World(BundleArchive(manifest, world.bundle.blobs)))

    assert server.update().samples == tiny.ROWS


def test_the_next_round_is_taken_when_it_fits(server: ScriptedServer, start: StartAgent) -> None:
    start()
    server.open(planned(3 << 29))
    server.decline()

    server.open(planned(1 << 20), number=2)

    assert server.update(2).round == 2


# -- an agent whose data are files: read as the bundle says, by what came from the broker with it ----------


NAMES = ("calm", "loud")


def world(reader: Reader, *more: bytes) -> World:
    """A round of the tiny bundle, whose samples are read so; ``more`` are blobs beside it."""
    bundle = tiny.make_bundle()
    data = msgspec.structs.replace(bundle.manifest.data, names=NAMES, reader=reader)
    blobs = dict(bundle.blobs)
    made = World(tiny.BundleArchive(msgspec.structs.replace(bundle.manifest, data=data), blobs))
    for content in more:
        made.add(content)
    return made


def expected(x: Array, y: Array) -> dict[str, Array]:
    weights = {name: array for part in tiny.weights().values() for name, array in part.items()}
    data = LocalData(x.astype(np.float32), y, "arrays")
    return train_round(tiny.make_bundle(), weights, data, open_engine("onnx"), seed=7).update


def test_left_out_rows_are_told_each_round(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    local = tiny.local()
    lines = [
        f"{a!r},{b!r},{c!r},{NAMES[label]}\n"
        for (a, b, c), label in zip(local.x.tolist(), local.y.tolist(), strict=True)
    ]
    own = written(tmp_path / "own.csv", "a,b,c,mood\n" + "".join(lines) + "1,2,?,calm\n")
    agent = start(data=own, bad_rows="skip")
    server.open(world(TableSpec(columns=("a", "b", "c"), label="mood")))

    found = weights_of(server.update())
    for name, array in expected(local.x, local.y).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    assert f"1 row is left out, {own}, line 12: column 'c' is '?'" in agent.event("round").text


def test_texts_use_the_blob_tokenizer(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    known = words(["a loud bang", "the calm sea", "a calm evening"], 20)
    texts = ["the sea", "a loud BANG", "a calm evening", "unheard sea", "bang"] * 2
    labels = [0, 1, 0, 0, 1] * 2
    made = world(TextSpec())
    ref = made.add(known.tokenizer)
    reader = TextSpec(tokenizer=ref)
    lines = [f"{NAMES[label]}\t{text}\n" for label, text in zip(labels, texts, strict=True)]
    start(data=written(tmp_path / "own.tsv", "".join(lines)))
    server.open(world(reader, known.tokenizer))

    x = np.array([(row + [0] * 3)[:3] for row in known.encoder()(texts)])
    found = weights_of(server.update())
    for name, array in expected(x, np.array(labels)).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)


def test_an_unknown_class_is_named_locally(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    agent = start(data=written(tmp_path / "own.csv", "a,b,c,mood\n1,2,3,angry\n"))
    server.open(world(TableSpec(columns=("a", "b", "c"), label="mood")))

    error = agent.event("data").text
    assert "own.csv, line 2: no class is called 'angry'; the federation's are calm, loud" in error
    assert server.decline().reason == "wrong-data"
