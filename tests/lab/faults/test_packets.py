"""MQTT packets out of a stream that comes in pieces of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgefl.lab.faults.links import Packets, second_copy

CONNECT, PUBLISH, BIG = b"\x10\x02ab", b"\x32\x07\x00\x03a/b\x00\x01", b"\x30\x80\x02" + bytes(256)


@given(st.lists(st.sampled_from([CONNECT, PUBLISH, BIG]), max_size=6), st.integers(1, 40))
def test_packets_are_found_however_they_are_cut(packets: list[bytes], size: int) -> None:
    stream, cutter = b"".join(packets), Packets()
    found = [packet for at in range(0, len(stream), size) for packet in cutter.feed(stream[at : at + size])]

    assert found == packets


@given(st.binary(max_size=100), st.integers(1, 7))
def test_no_byte_of_any_stream_is_lost_or_added(stream: bytes, size: int) -> None:
    cutter = Packets()
    found = b"".join(
        packet for at in range(0, len(stream), size) for packet in cutter.feed(stream[at : at + size])
    )

    assert stream.startswith(found)


def test_a_second_copy_is_a_publish_that_says_so() -> None:
    assert second_copy(CONNECT) is None
    assert second_copy(PUBLISH) == b"\x3a" + PUBLISH[1:]
    assert second_copy(b"\x30\x05\x00\x03a/b") == b"\x30\x05\x00\x03a/b"
