"""What is said where there is no connection, and what to do about it: no broker is needed for that."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

import pytest

from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.connection import dial, make_client, unreachable_text

ADDRESS = Address("broker.example", 1883)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ConnectionRefusedError("refused"), "does a broker run there, and listen on this port?"),
        (socket.gaierror(-2, "unknown"), "is the name right, and does this machine have a network?"),
        (OSError(errno.ENETUNREACH, "no way"), "does this machine have a network?"),
        (
            OSError(errno.EHOSTUNREACH, "no way"),
            "is that machine on, and does a firewall let this port through?",
        ),
        (TimeoutError("timed out"), "is that machine on, and does a firewall let this port through?"),
        (ValueError("odd"), "odd"),
    ],
)
def test_what_to_do_depends_on_what_went_wrong(error: Exception, remedy: str) -> None:
    told = unreachable_text(ADDRESS, error)

    assert told.startswith("cannot reach the broker at broker.example:1883: ")
    assert told.endswith(remedy)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("_ssl.c:989: The handshake operation timed out")]
)
def test_a_port_that_knows_no_tls_is_told_from_one_that_is_away(error: Exception) -> None:
    assert unreachable_text(replace(ADDRESS, tls=True), error).endswith("; is this port one for TLS?")
    assert "TLS" not in unreachable_text(ADDRESS, error)


def test_a_port_without_websocket_is_told_from_one_that_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], path="/mqtt")
        client = make_client(address, "a", clean=True, max_inflight=1, most_bytes=1 << 16)
        client.connect_timeout = 0.2
        with pytest.raises(TimeoutError) as late:
            dial(client, address, "5", clean=True, keepalive_s=60, max_inflight=1)
    assert "the port accepts connections and speaks no WebSocket" in unreachable_text(address, late.value)
