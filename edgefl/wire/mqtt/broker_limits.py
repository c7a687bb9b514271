"""Detection of the limits with which a broker ends connections."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import paho.mqtt.client as paho

from edgefl.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import connection
from edgefl.wire.mqtt.address import Address

_NO_QOS_1 = "takes no messages of QoS 1 (Mosquitto: max_qos); allow them"
_NO_RETAINED = "takes no retained messages (Mosquitto: retain_available); allow them"
_RETAIN_NOT_SUPPORTED, _QOS_NOT_SUPPORTED = 154, 155
"""Reason codes of MQTT 5."""
_ANSWER_S = 10.0
_QUIET_S = 0.5
"""Mosquitto acknowledges a message that is too large to a client of MQTT 3.1.1, and hangs up then."""
_TRIALS = 6
_LONGER = 4
"""Factor between the lifetimes of an accepted and a refused trial: six short connections between long ones are no chance."""


def announced_limit(code: object, properties: object) -> str:
    """Return the limit in a CONNACK of MQTT 5 with which no federation can run; empty if there is none.

    A broker that retains nothing refuses whoever comes with a retained will.
    """
    value = getattr(code, "value", 0)
    if value == _QOS_NOT_SUPPORTED or getattr(properties, "MaximumQoS", 1) == 0:
        return _NO_QOS_1
    if value == _RETAIN_NOT_SUPPORTED or getattr(properties, "RetainAvailable", 1) == 0:
        return _NO_RETAINED
    return ""


def size_limit(nbytes: int, most: int = 0) -> str:
    """Return the text for a broker that refuses messages of ``nbytes`` bytes; ``most``: the size that it takes, if known."""
    known = f", {most} at most" if most else ""
    return (
        f"takes no messages of {nbytes} bytes{known} (Mosquitto: message_size_limit, max_packet_size); raise its limit, "
        "or set limits.chunk_bytes of the federation lower"
    )


def find_limit(address: Address, version: str, client_id: str, topic: str, nbytes: int) -> str | None:
    """Find the limit with which the broker ends connections of ours.

    A link may break in any trial. A limit is found if the broker ends each of several trials that exceed it, and none of
    those between, which keep within it and last longer.

    Args:
        address: the broker.
        version: of MQTT, as the session speaks it.
        client_id: of the session that is ended; each trial connects under one like it.
        topic: of a message of that session; trials publish below it, on a topic without subscribers.
        nbytes: bytes of the largest message of that session.

    Returns:
        the limit and what to do, an empty text if the broker takes such messages, or None if trials broke without a limit.
    """
    # An access list may know client ids by their first or their last letters.
    name = client_id.replace("edgefl:", "edgefl:probe-", 1)
    name = name if name != client_id else client_id[:-1] + ("1" if client_id.endswith("0") else "0")
    prober = _Prober(address, version, name, f"{topic}/probe")
    taken = None
    for message, limit in (
        (_ProbeMessage(0, 0, False), ""),
        (_ProbeMessage(0, 1, False), _NO_QOS_1),
        (_ProbeMessage(0, 1, True), _NO_RETAINED),
        (_ProbeMessage(nbytes, 1, False), size_limit(nbytes)),
    ):
        lived_s = prober.lifetime(message, _QUIET_S)
        if lived_s is None:
            return ""
        if lived_s < math.inf:
            return limit if taken is not None and prober.is_limit(message, taken) else None
        taken = message
    return ""


class _ProbeMessage(NamedTuple):
    """Message of one trial."""

    nbytes: int
    qos: int
    retain: bool


@dataclass(frozen=True)
class _Prober:
    """Trials with one message each, on connections of their own."""

    address: Address
    version: str
    name: str
    topic: str

    def is_limit(self, refused: _ProbeMessage, taken: _ProbeMessage) -> bool:
        """Return True if the broker always ends the connection at ``refused`` and never at ``taken``."""
        for _ in range(_TRIALS):
            lived_s = self.lifetime(refused, _QUIET_S)
            if lived_s is None or lived_s == math.inf:
                return False
            longer_s = min(max(_QUIET_S / 2, _LONGER * lived_s), _ANSWER_S)
            if self.lifetime(taken, longer_s) != math.inf:
                return False
        return True

    def lifetime(self, message: _ProbeMessage, quiet_s: float) -> float | None:
        """Publish ``message`` and wait for ``quiet_s`` after its acknowledgement.

        Returns:
            seconds until the connection ended, infinity if it did not, or None if there was none.
        """
        limits = Limits()
        try:
            client = connection.make_client(
                self.address,
                self.name,
                clean=True,
                max_inflight=1,
                most_bytes=connection.most_bytes(limits),
            )
        except BrokerError:
            return None
        try:
            connection.dial(client, self.address, self.version, clean=True, keepalive_s=20, max_inflight=1)
            if not (_loop(client, client.is_connected) and client.is_connected()):
                return None
            began = time.monotonic()
            sent = client.publish(self.topic, bytes(message.nbytes), message.qos, message.retain)
            held = _loop(client, sent.is_published) and _loop(client, lambda: False, quiet_s)
            return math.inf if held else time.monotonic() - began
        except (OSError, ValueError):
            return None
        finally:
            client.say_goodbye()


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
