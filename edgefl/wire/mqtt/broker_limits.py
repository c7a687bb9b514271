"""Detection of the limits with which a broker ends connections."""

from __future__ import annotations

import time
from collections.abc import Callable

import paho.mqtt.client as paho

from edgefl.wire.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import connection
from edgefl.wire.mqtt.address import Address

_ANSWER_S = 10.0
_QUIET_S = 0.5
"""Mosquitto acknowledges a message that is too large to a client of MQTT 3.1.1, and hangs up then."""


def announced_limit(properties: object) -> str:
    """Return the limit in a CONNACK of MQTT 5 with which no federation can run; empty if there is none."""
    if getattr(properties, "MaximumQoS", 1) == 0:
        return "takes no messages of QoS 1 (Mosquitto: max_qos); allow them"
    if getattr(properties, "RetainAvailable", 1) == 0:
        return "takes no retained messages (Mosquitto: retain_available); allow them"
    return ""


def size_limit(nbytes: int, most: int = 0) -> str:
    """Return the text for a broker that refuses messages of ``nbytes`` bytes; ``most``: the size that it takes, if known."""
    known = f", {most} at most" if most else ""
    return (
        f"takes no messages of {nbytes} bytes{known} (Mosquitto: message_size_limit, max_packet_size); raise its limit, "
        "or set limits.chunk_bytes of the federation lower"
    )


def find_limit(address: Address, version: str, client_id: str, topic: str, nbytes: int) -> str:
    """Find the limit with which the broker ends connections of ours.

    Args:
        address: the broker.
        version: of MQTT, as the session speaks it.
        client_id: of the session that is ended; each trial connects under one like it.
        topic: of a message of that session; trials publish below it, on a topic without subscribers.
        nbytes: bytes of the largest message of that session.

    Returns:
        the limit and what to do, or an empty text if the broker takes such messages.
    """
    trials = (
        (0, 0, False, ""),
        (0, 1, False, "takes no messages of QoS 1 (Mosquitto: max_qos); allow them"),
        (0, 1, True, "takes no retained messages (Mosquitto: retain_available); allow them"),
        (nbytes, 1, False, size_limit(nbytes)),
    )
    # An access list may know client ids by their first or their last letters.
    name = client_id.replace("edgefl:", "edgefl:probe-", 1)
    name = name if name != client_id else client_id[:-1] + ("1" if client_id.endswith("0") else "0")
    for size, qos, retain, limit in trials:
        client = _connected(address, version, name)
        if client is None:
            return ""
        sent = client.publish(f"{topic}/probe", bytes(size), qos, retain)
        if not (_loop(client, sent.is_published) and _loop(client, lambda: False, _QUIET_S)):
            return limit
        client.disconnect()
    return ""


def _connected(address: Address, version: str, name: str) -> paho.Client | None:
    """Connect under the id ``name``; return None if that cannot be."""
    try:
        client = connection.make_client(
            address, name, clean=True, max_inflight=1, most_bytes=connection.most_bytes(Limits())
        )
        connection.dial(client, address, version, clean=True, keepalive_s=20, max_inflight=1)
    except (BrokerError, OSError, ValueError):
        return None
    return client if _loop(client, client.is_connected) and client.is_connected() else None


def _loop(client: paho.Client, done: Callable[[], bool], within_s: float = _ANSWER_S) -> bool:
    """Run the connection until ``done`` or for ``within_s``; return False if it ends before."""
    until = time.monotonic() + within_s
    while not done() and (left := until - time.monotonic()) > 0:
        try:
            if client.loop(timeout=min(left, 0.1)) != paho.MQTT_ERR_SUCCESS:
                return False
        except Exception:  # of paho's parser: it cannot read some answers to what is too large
            return False
    return True
