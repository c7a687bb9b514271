"""Sizes of PUBLISH packets, against what paho writes to its socket."""

from __future__ import annotations

import socket
import threading

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.wire.mqtt.topics import PublishTraffic, publish_bytes

CONNACK = b"\x20\x02\x00\x00"


def written(topic: str, payload: int, qos: int) -> bytes:
    """All that a client writes after CONNACK when it publishes once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = paho.Client(CallbackAPIVersion.VERSION2, "c")
        thread = threading.Thread(target=client.connect, args=listener.getsockname())
        thread.start()
        peer, _ = listener.accept()
        thread.join()
        with peer:
            peer.settimeout(10)
            assert peer.recv(100)[0] >> 4 == 1  # CONNECT
            peer.sendall(CONNACK)
            while not client.is_connected():
                client.loop(0.1)
            client.publish(topic, bytes(payload), qos=qos)
            sending = threading.Thread(target=client.disconnect)
            sending.start()
            found = b""
            while (data := peer.recv(1 << 20)) and not (found + data).endswith(b"\xe0\x00"):
                found += data
            sending.join()
            client.loop(0.01)
    return (found + data).removesuffix(b"\xe0\x00")  # DISCONNECT


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("payload", [0, 1, 118, 119, 120, 121, 122, 16374, 16375, 16380, 20000])
def test_the_size_of_a_packet_is_what_a_client_writes(payload: int, qos: int) -> None:
    assert publish_bytes("a/b/c", payload, qos) == len(written("a/b/c", payload, qos))


def test_a_topic_counts_in_bytes_not_in_letters() -> None:
    assert publish_bytes("gerät", 0, 0) == 2 + 2 + 6


def test_the_longest_header_has_four_length_bytes() -> None:
    assert publish_bytes("t", 2_097_151 - 3, 0) == 1 + 3 + 2_097_151
    assert publish_bytes("t", 2_097_152 - 3, 0) == 1 + 4 + 2_097_152


def test_traffic_adds_up() -> None:
    assert PublishTraffic.of("t", 10, 1) + PublishTraffic.of("t", 5, 0) == PublishTraffic(
        15, 10 + 2 + 3 + 2 + 5 + 2 + 3
    )
