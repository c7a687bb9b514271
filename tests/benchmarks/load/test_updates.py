"""Updates out of one: what the server reads is what each device would have sent by itself."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.updates import MessageSigner, OutgoingUpdate, UpdateTemplate, garbage, values_of
from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import DataSpec, Graph, Manifest, Port
from edgefl.wire.mqtt.envelope import open_message
from edgefl.wire.mqtt.messages import Round, Status, Task, Update, UpdateChunk, decode
from edgefl.wire.mqtt.topics import Topics

TASK = Task(run="r", round=3, tier="all", seed=1, nonce="0123456789abcdef01234567")
ROUND = Round(
    run="r", round=3, state="open", model_version="m", offers={}, units={}, hyper={}, base=2, deadline=0.0
)
MINE = Topics("demo").device("load-00001")


def manifest(*ports: Port) -> Manifest:
    graph = Graph(name="g", format="onnx", blob=describe(b"g", 64), inputs=(), outputs=ports)
    return Manifest(
        model="tiny", program="sgd", tier="all", parameters=1,
        data=DataSpec(shape=(1,), dtype="float32", classes=2), batch=1, prefix=(), suffix=(), start="g", phases=(),
        finish="g", evaluate="g", hyper={}, graphs=(graph,), codec="dense", codec_version=1, draws="walk",
    )  # fmt: skip


def port(name: str, dtype: str, *shape: int, **more: Any) -> Port:
    return Port(name=f"update.{name}", role="update", dtype=dtype, shape=shape, **more)


def chunks(outgoing: OutgoingUpdate, voice: MessageSigner) -> list[UpdateChunk]:
    """As the server opens them: every signature holds."""
    found = []
    for index in range(outgoing.count):
        chunk, topic = outgoing.chunk(index), MINE.update(outgoing.round, index)
        payload = b"".join(voice.seal_chunk(topic, chunk.body, chunk.digest))
        opened = open_message(UpdateChunk, topic, payload)
        assert opened.key == voice.public
        found.append(opened.message)
    return found


@given(
    entries=st.integers(0, 900), room=st.integers(64, 1500), device=st.sampled_from(["load-00001", "x" * 60])
)
def test_the_chunks_of_an_update_are_the_update(entries: int, room: int, device: str) -> None:
    values = tensors.dump({"a": np.arange(entries, dtype=np.float32)})
    template = UpdateTemplate.of(manifest(), values, ROUND, TASK, room + 512)
    outgoing = template.update(device, TASK, samples=12)
    pieces = chunks(outgoing, MessageSigner("0", device))
    whole = b"".join(piece.data for piece in pieces)

    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert {(piece.nonce, piece.count, piece.size) for piece in pieces} == {
        (TASK.nonce, len(pieces), len(whole))
    }
    assert {piece.sha256 for piece in pieces} == {hashlib.sha256(whole).hexdigest()} == {outgoing.sha256}
    assert all(len(piece.data) == template.room for piece in pieces[:-1])
    update = decode(Update, whole)
    assert (update.device, update.nonce, update.samples, update.tensors) == (device, TASK.nonce, 12, values)
    assert (update.run, update.round, update.tier, update.model_version) == ("r", 3, "all", "m")
    assert len(msgspec.msgpack.decode(whole)) == len(Update.__struct_fields__)


def test_two_devices_share_a_template_and_nothing_else() -> None:
    template = UpdateTemplate.of(manifest(), bytes(5000), ROUND, TASK, 2048)
    first, second = template.update("load-00001", TASK, 1), template.update("load-00002", TASK, 1)
    other = msgspec.structs.replace(TASK, nonce="f" * 24)
    third = template.update("load-00001", other, 1)
    assert len({first.sha256, second.sha256, third.sha256}) == 3
    for outgoing in (first, second, third, first):
        whole = b"".join(piece.data for piece in chunks(outgoing, MessageSigner("0", "load-00001")))
        assert hashlib.sha256(whole).hexdigest() == outgoing.sha256


def test_garbage_is_whole_and_no_update() -> None:
    outgoing = garbage(
        UpdateTemplate.of(manifest(), bytes(5000), ROUND, TASK, 2048).update("d", TASK, 1), b"\xc1" * 1600
    )
    pieces = chunks(outgoing, MessageSigner("0", "d"))
    whole = b"".join(piece.data for piece in pieces)
    assert whole == b"\xc1" * 1600 and pieces[0].sha256 == hashlib.sha256(whole).hexdigest()


def test_the_values_are_those_that_the_manifest_asks_for() -> None:
    ports = (port("codes", "uint8", 100), port("scales", "float32", 4), port("halves", "float16", 3, 2))
    arrays = tensors.load(values_of(manifest(*ports), seed=0))
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "codes": ("uint8", (100,)), "scales": ("float32", (4,)), "halves": ("float16", (3, 2)),
    }  # fmt: skip
    assert (arrays["scales"] >= 0).all() and np.isfinite(arrays["halves"]).all() and arrays["codes"].any()


def test_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match="mask"):
        values_of(manifest(port("mask", "uint8", 2, mask=9)), seed=0)


def test_a_signer_is_the_same_at_the_next_start_and_goes_on() -> None:
    first = MessageSigner("0", "a")
    said = open_message(Status, "t", first.seal("t", Status(online=True)))
    again = MessageSigner("0", "a")
    later = open_message(Status, "t", again.seal("t", Status(online=True)))
    assert said.key == later.key == first.public and later.at > said.at
    assert len({MessageSigner("0", "b").public, MessageSigner("1", "a").public, first.public}) == 3
