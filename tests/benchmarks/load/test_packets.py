"""The tiny MQTT client's packets: whatever way a stream is cut, the same packets come out; and paho reads what it writes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import packets
from benchmarks.load.packets import Packet, Parser
from edgefl.errors import ProtocolError
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.topics import publish_bytes

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
