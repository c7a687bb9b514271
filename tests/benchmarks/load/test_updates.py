"""Updates out of one: what the server reads is what each device would have sent by itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import packets
from benchmarks.load.packets import Packet, Parser
from benchmarks.load.settings import BehaviourShares, LoadSettings, quantile
from benchmarks.load.updates import LoadSigner, OutgoingUpdate, UpdateTemplate, garbage, values_of
from edgefl.wire import tensors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import DataSpec, Graph, Manifest, Port
from edgefl.wire.mqtt.envelope import open_message
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Round, Status, Task, Update, UpdateChunk, decode
from edgefl.wire.mqtt.topics import Topics, publish_bytes
from tests.support.errors import ConfigError, ProtocolError, refuses

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


def chunks(outgoing: OutgoingUpdate, voice: LoadSigner) -> list[UpdateChunk]:
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
    pieces = chunks(outgoing, LoadSigner("0", device))
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
        whole = b"".join(piece.data for piece in chunks(outgoing, LoadSigner("0", "load-00001")))
        assert hashlib.sha256(whole).hexdigest() == outgoing.sha256


def test_garbage_is_whole_and_no_update() -> None:
    outgoing = garbage(
        UpdateTemplate.of(manifest(), bytes(5000), ROUND, TASK, 2048).update("d", TASK, 1), b"\xc1" * 1600
    )
    pieces = chunks(outgoing, LoadSigner("0", "d"))
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
    with refuses(ConfigError, codec="dense"):
        values_of(manifest(port("mask", "uint8", 2, mask=9)), seed=0)


def test_a_signer_is_the_same_at_the_next_start_and_goes_on() -> None:
    first = LoadSigner("0", "a")
    said = open_message(Status, "t", first.seal("t", Status(online=True)))
    again = LoadSigner("0", "a")
    later = open_message(Status, "t", again.seal("t", Status(online=True)))
    assert said.key == later.key == first.public and later.at > said.at
    assert len({LoadSigner("0", "b").public, LoadSigner("1", "a").public, first.public}) == 3


# -- the tiny MQTT client's packets ----------------------------------------------------------------------------


NUMBERS = st.integers(1, 65_535)
TOPICS = st.text(st.characters(codec="utf-8", exclude_characters="\0+#"), min_size=1, max_size=40)


def ack(kind: int, number: int, codes: bytes = b"") -> bytes:
    return bytes((kind << 4, 2 + len(codes))) + number.to_bytes(2) + codes


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Packet]]:
    """What a broker may say, and what that is."""
    said, meant = b"", []
    for kind in draw(
        st.lists(st.sampled_from(["publish", "puback", "suback", "connack", "ping"]), max_size=8)
    ):
        number = draw(NUMBERS)
        if kind == "publish":
            topic, payload, qos = draw(TOPICS), draw(st.binary(max_size=300)), draw(st.integers(0, 1))
            said += packets.publish_head(topic, len(payload), number=number * qos) + payload
            meant.append(Packet(packets.PUBLISH, number * qos, topic, payload, qos))
        elif kind == "puback":
            said += packets.puback(number)
            meant.append(Packet(packets.PUBACK, number))
        elif kind == "suback":
            said += ack(packets.SUBACK, number, b"\x01\x80")
            meant.append(Packet(packets.SUBACK, number, codes=b"\x01\x80"))
        elif kind == "connack":
            said += b"\x20\x02\x01\x05"
            meant.append(Packet(packets.CONNACK, 5, resumed=True))
        else:
            said += b"\xd0\x00"
            meant.append(Packet(packets.PINGRESP))
    return said, meant


@given(streams(), st.lists(st.integers(0, 2000), max_size=10))
def test_a_stream_is_read_however_it_is_cut(stream: tuple[bytes, list[Packet]], cuts: list[int]) -> None:
    said, meant = stream
    parser, found = Parser(), []
    places = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    for start, end in pairwise(places):
        found += parser.feed(said[start:end])
    assert found == meant


def test_a_stream_is_read_byte_by_byte() -> None:
    payload = bytes(range(256)) * 100
    said = b"\x20\x02\x00\x00" + packets.publish_head("a/b", len(payload), number=7) + payload + b"\xd0\x00"
    parser = Parser()
    found = [packet for index in range(len(said)) for packet in parser.feed(said[index : index + 1])]
    assert [packet.kind for packet in found] == [packets.CONNACK, packets.PUBLISH, packets.PINGRESP]
    assert found[1].payload == payload


@given(st.binary(max_size=60))
def test_what_is_no_mqtt_is_refused_or_waits_for_more(rubbish: bytes) -> None:
    try:
        for packet in Parser().feed(rubbish):
            assert isinstance(packet, Packet)
    except ProtocolError as error:
        assert error.message.startswith("the broker sent")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"\x30\xff\xff\xff\xff", "length has no end"),
        (b"\x30\xff\xff\xff\x7f", "more than"),
        (b"\x32\x03\x00\x05a", "should have"),
        (b"\x30\x03\x00\x01\xff", "no text"),
        (b"\x10\x02\x00\x00", "kind 1"),
        (b"\x40\x00", "kind 4"),
    ],
)
def test_the_refusal_says_what_came(said: bytes, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        list(Parser().feed(said))


@given(TOPICS, st.integers(0, 300_000), NUMBERS, st.booleans())
def test_a_publish_takes_the_bytes_counted_for_it(topic: str, size: int, number: int, retain: bool) -> None:
    head = packets.publish_head(topic, size, number=number, retain=retain)
    assert len(head) + size == publish_bytes(topic, size, 1)


def test_connect_is_as_the_standard_has_it() -> None:
    """MQTT 3.1.1, 3.1: the example's flags, and the order of what follows them."""
    said = packets.connect("me", keepalive_s=10, will=Will("w", b"gone"), username="u", password="p")
    assert said == (b"\x10\x1d\x00\x04MQTT\x04\xec\x00\x0a\x00\x02me\x00\x01w\x00\x04gone\x00\x01u\x00\x01p")
    assert (
        packets.connect("me", keepalive_s=10, clean=True) == b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x0a\x00\x02me"
    )


# -- who behaves how, and what is no load ------------------------------------------------------------------


def test_behaviours_come_in_the_shares_that_were_asked_for() -> None:
    shares = BehaviourShares(vanish=0.1, late=0.2, garbage=0.3)
    drawn = Counter(shares.behaviour("0", f"load-{number}", 1) for number in range(2000))
    wanted = {"vanish": 200, "late": 400, "garbage": 600, "honest": 800}
    assert drawn.keys() == wanted.keys()
    assert all(abs(drawn[name] - count) < 90 for name, count in wanted.items()), drawn


def test_a_behaviour_depends_on_seed_device_and_round_and_nothing_else() -> None:
    shares = BehaviourShares(late=0.5)
    drawn = [shares.behaviour("0", f"load-{number}", 1) for number in range(64)]
    assert drawn == [shares.behaviour("0", f"load-{number}", 1) for number in range(64)]
    assert drawn != [shares.behaviour("0", f"load-{number}", 2) for number in range(64)]
    assert drawn != [shares.behaviour("1", f"load-{number}", 1) for number in range(64)]


def test_all_or_none() -> None:
    assert {BehaviourShares(duplicate=1.0).behaviour("0", str(n), n) for n in range(50)} == {"duplicate"}
    assert {BehaviourShares().behaviour("0", str(n), n) for n in range(50)} == {"honest"}


@pytest.mark.parametrize("shares", [{"late": 1.5}, {"vanish": -0.1}, {"late": 0.6, "garbage": 0.6}])
def test_shares_that_cannot_be_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(shares))):
        BehaviourShares(**shares)


def test_names_have_equal_lengths() -> None:
    assert LoadSettings("demo", 2, prefix="strong-", first=9).names == ["strong-00009", "strong-00010"]
    assert {len(name) for name in LoadSettings("demo", 3, first=99_999).names} == {len("load-") + 6}


def test_a_prefix_that_no_topic_takes_is_refused() -> None:
    with refuses(ConfigError, kind="device", name="a/b00000"):
        LoadSettings("demo", 1, prefix="a/b")


def test_quantiles_are_values_that_were_there() -> None:
    times = [float(number) for number in range(1, 101)]
    assert (quantile(times, 0.5), quantile(times, 0.99), quantile(times, 1.0)) == (50.0, 99.0, 100.0)
    assert quantile([3.0], 0.99) == 3.0 and quantile([], 0.5) == 0.0
