"""Detection of broker limits that make a broker end our connections, and of features that a broker lacks."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_NO_RETAINED_BY_WILDCARD = (
    "sends no retained messages to subscriptions with wildcards (RabbitMQ has no such feature), so devices that are "
    "connected already would not be found; use a broker that sends them, such as Mosquitto, EMQX, HiveMQ, aedes or "
    "`edgefl broker`"
)
_ANSWER_S = 10.0
_CHECK_S = 20.0
"""Longest time of the check of features, without its connection."""
_CLEAR_S = 1.0
_RETAINED_S = 5.0
_SLOWER = 10
"""Factor between the waits for a retained message by a filter and by its topic."""
_QUIET_S = 0.5
"""Mosquitto acknowledges a message that is too large to a client of MQTT 3.1.1, and hangs up then."""
_TRIALS = 6
_LONGER = 4
"""Factor between the lifetimes of an accepted and a refused trial: six short connections between long ones are no chance."""


def announced_limit(code: object, properties: object) -> str:
    """Return the text of a limit in the broker's CONNACK (MQTT 5) with which edgefl cannot run, or "" if there is none.

    A broker without retained messages refuses our connection because of its retained last will.

    Args:
        code: Reason code of the CONNACK.
        properties: Properties of the CONNACK.
    """
    value = getattr(code, "value", 0)
    if value == _QOS_NOT_SUPPORTED or getattr(properties, "MaximumQoS", 1) == 0:
        return _NO_QOS_1
    if value == _RETAIN_NOT_SUPPORTED or getattr(properties, "RetainAvailable", 1) == 0:
        return _NO_RETAINED
    return ""


def size_limit(nbytes: int, most: int = 0) -> str:
    """Return the text for a broker that refuses messages of this size, with a remedy.

    Args:
        nbytes: Size of the refused message.
        most: Largest size that the broker accepts. 0: unknown.
    """
    known = f", {most} at most" if most else ""
    return (
        f"takes no messages of {nbytes} bytes{known} (Mosquitto: message_size_limit, max_packet_size); raise its limit, "
        "or set limits.chunk_bytes of the federation lower"
    )


def find_limit(address: Address, version: str, client_id: str, topic: str, nbytes: int) -> str | None:
    """Find out by trial connections which limit makes the broker end our connections.

    A link may break in any trial. So a limit is found only if the broker ends each of several trials that exceed it,
    and none of the trials in between, which respect it and last longer.

    Args:
        address: Broker.
        version: Version of MQTT of the session that was ended.
        client_id: Client id of that session; the trials use a similar id.
        topic: Topic of a message of that session. The trials publish on ``topic/probe``, which has no subscribers.
        nbytes: Size of the largest message of that session.

    Returns:
        The limit with a remedy, "" if the broker accepts such messages or cannot be reached, or None if connections
        broke for another reason.
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
    """Size, QoS and retain flag of the message that a trial publishes."""

    nbytes: int
    qos: int
    retain: bool


@dataclass(frozen=True)
class _Prober:
    """Trial connections to a broker, each of which publishes one message.

    Attributes:
        address: Broker.
        version: Version of MQTT.
        name: Client id of the trials.
        topic: Topic of the published messages.
    """

    address: Address
    version: str
    name: str
    topic: str

    def is_limit(self, refused: _ProbeMessage, taken: _ProbeMessage) -> bool:
        """Return True if the broker ends every connection that publishes ``refused``, and none that publishes ``taken``."""
        for _ in range(_TRIALS):
            lived_s = self.lifetime(refused, _QUIET_S)
            if lived_s is None or lived_s == math.inf:
                return False
            longer_s = min(max(_QUIET_S / 2, _LONGER * lived_s), _ANSWER_S)
            if self.lifetime(taken, longer_s) != math.inf:
                return False
        return True

    def lifetime(self, message: _ProbeMessage, quiet_s: float) -> float | None:
        """Connect, publish ``message``, and wait for ``quiet_s`` after its acknowledgement.

        Returns:
            Seconds until the broker ended the connection, infinity if it did not, or None if no connection was
            established.
        """
        try:
            with _connected(self.address, self.version, self.name) as client:
                began = time.monotonic()
                sent = client.publish(self.topic, bytes(message.nbytes), message.qos, message.retain)
                held = _loop(client, sent.is_published) and _loop(client, lambda: False, quiet_s)
                return math.inf if held else time.monotonic() - began
        except (BrokerError, OSError, ValueError):
            return None


@contextmanager
def _connected(address: Address, version: str, name: str) -> Iterator[connection.BoundedClient]:
    """Yield a client with a clean session that is connected. Disconnect it at the end.

    Raises:
        BrokerError: A certificate file cannot be used.
        OSError: No connection was established.
        ValueError: The address or the answer is malformed.
    """
    client = connection.make_client(
        address, name, clean=True, max_inflight=1, most_bytes=connection.most_bytes(Limits())
    )
    try:
        connection.dial(client, address, version, clean=True, keepalive_s=20, max_inflight=1)
        if not (_loop(client, client.is_connected) and client.is_connected()):
            raise ConnectionError(f"no connection to the broker at {address}")
        yield client
    finally:
        client.say_goodbye()


def check_features(address: Address, version: str, client_id: str, topic: str, topic_filter: str) -> None:
    """Check that the broker has the features that edgefl needs and no broker announces.

    That is one feature: retained messages that match a subscription with wildcards. The check publishes a retained
    message, subscribes to its topic and then to the filter, and clears the message. It needs a connection of its own,
    some packets, and no waiting at a good broker.

    The check finds nothing if the connection breaks, an access list hides the message, or the broker is too slow.

    Args:
        address: Broker.
        version: Version of MQTT.
        client_id: Client id of the connection. No other client may use it.
        topic: Topic that this client may write to and read, and whose subscribers ignore the message.
        topic_filter: Filter with wildcards that matches ``topic``.

    Raises:
        BrokerError: The broker lacks the feature.
    """
    until = time.monotonic() + _CHECK_S
    try:
        with _connected(address, version, client_id) as client:
            lacks = _lacks_wildcards(client, version, topic, topic_filter, until)
            if client.is_connected():
                cleared = client.publish(topic, b"", 1, retain=True)
                _loop(client, cleared.is_published, max(_CLEAR_S, until - time.monotonic()))
    except (BrokerError, OSError, ValueError):
        return
    if lacks:
        raise BrokerError(f"the broker at {address} {_NO_RETAINED_BY_WILDCARD}", address=str(address))


def _lacks_wildcards(client: paho.Client, version: str, topic: str, topic_filter: str, until: float) -> bool:
    """Return True if a message that is retained on ``topic`` comes for its topic, and not for ``topic_filter``.

    The wait for the filter's copy is a multiple of the wait for the topic's, because a broker may be slow.
    """
    mark, copies = secrets.token_bytes(16), 0

    def count(_client: object, _data: object, message: paho.MQTTMessage) -> None:
        nonlocal copies
        copies += message.retain and message.payload == mark  # of any topic: RabbitMQ changes dots in topics

    client.on_message = count
    sent = client.publish(topic, mark, 1, retain=True)
    if not (_loop(client, sent.is_published, until - time.monotonic()) and sent.is_published()):
        return False
    began = time.monotonic()
    client.subscribe(connection.subscriptions([(topic, 1)], version))
    _loop(client, lambda: copies > 0, min(_RETAINED_S, until - began))
    if copies == 0:
        return False
    within_s = max(_RETAINED_S, _SLOWER * (time.monotonic() - began))
    if time.monotonic() + within_s > until:
        return False
    client.subscribe(connection.subscriptions([(topic_filter, 1)], version))
    return _loop(client, lambda: copies > 1, within_s) and copies == 1


def _loop(client: paho.Client, done: Callable[[], bool], within_s: float = _ANSWER_S) -> bool:
    """Run the client's network loop until ``done`` returns True or ``within_s`` seconds have passed.

    Return False if the connection ended before that, else True.
    """
    until = time.monotonic() + within_s
    try:
        while not done() and (left := until - time.monotonic()) > 0:
            if client.loop(timeout=min(left, 0.1)) != paho.MQTT_ERR_SUCCESS:
                return False
    except Exception:  # of paho: an answer that it cannot read, or a message that was never sent
        return False
    return True
