"""Broker session of server and devices: stable client id, persistent session, reconnects with jitter, last will.

All events arrive in order in :attr:`Session.inbox`. The network thread never runs user code. ::

    session = Session(Address("localhost", 1883), "edgefl-phone-7", limits=Limits(), will=Will(topic, payload))
    session.start()
    session.subscribe(["a/b"], qos=1)
    match session.inbox.get():
        case Connected(resumed): ...
        case IncomingMessage(topic, payload): ...
        case Disconnected(reason): ...
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import paho.mqtt.client as paho

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import connection
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.broker_limits import announced_limit, find_limit, size_limit
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.events import (
    Connected,
    Disconnected,
    Event,
    EventSink,
    Inbox,
    IncomingMessage,
    Refusal,
    Wakeup,
    WillSource,
)
from edgefl.wire.mqtt.topics import publish_bytes

_SUBSCRIBE_BATCH = 8
_ASK_AGAIN = 3
"""Number of longest reconnect pauses after which a refused subscription is repeated, in case the access list was
corrected."""
_PROPERTIES_BYTES = 16
_MOMENT_S = 5.0
_UNANSWERED = "unanswered"
_ANSWER_S = 10.0
"""Timeout of the broker's CONNACK. An old broker may wait for the rest of a packet that it cannot parse."""
_SILENT_S = 3.0
"""Seconds until a broker without a CONNACK is reported."""
_TOO_LARGE = 149
"""Reason code of MQTT 5."""
_RIVAL_AFTER = 3
"""Number of short connections in a row that indicate a rival. A broken link fails less regularly."""


def make_inbox(limits: Limits) -> Inbox[Any]:
    """Return an inbox of the size that ``limits`` allow. It blocks the network thread less than the keep-alive permits."""
    patience_s = min(2.0, limits.keepalive_s / 8)
    return Inbox(messages=limits.inbox_messages, nbytes=limits.inbox_bytes, patience_s=patience_s)


class Session:
    """Connection to a broker that reconnects by itself. Thread-safe.

    Args:
        address: Broker.
        client_id: MQTT client id.
        limits: Timeouts and sizes.
        will: Last will, or a source of one for each connection.
        clean: The broker deletes the session when the connection ends. For a client id that is used once.
        rng: Random source of the reconnect jitter.
        events: Receiver of all events instead of :attr:`inbox`, called on the network thread or on the thread that
            calls :meth:`wake`. Its ``put`` must not block for long.

    Attributes:
        inbox: Queue of the events.
        received_bytes: Payload bytes received.
        sent_bytes: Payload bytes published.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        *,
        limits: Limits,
        will: WillSource | None = None,
        clean: bool = False,
        rng: random.Random | None = None,
        events: EventSink[Event] | None = None,
    ) -> None:
        self.inbox: Inbox[Event] = make_inbox(limits)
        self._deliver = (self.inbox if events is None else events).put
        self.received_bytes = 0
        self.sent_bytes = 0
        self._address = address
        self._limits = limits
        self._rng = random.Random() if rng is None else rng
        self._stopping = threading.Event()
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._standing: OrderedDict[str, int] = OrderedDict()
        self._waiting: list[list[tuple[str, int]]] = []
        self._asked: list[tuple[str, int]] = []
        self._leaving: dict[int, list[str]] = {}
        self._denied: dict[str, int] = {}
        self._ask_again_at = 0.0
        self._refusal = ""
        self._ended = ""
        self._up_since = 0.0
        self._most_bytes = 0
        self._largest = "", 0
        self._limit = ""
        self._id = client_id
        self._clean = clean
        self._first = self._version = "3.1.1" if address.mqtt == "3.1.1" else "5"
        self._older = 0
        self._will = will
        self._client = self._make_client(client_id, clean)
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    def _make_client(self, client_id: str, clean: bool) -> connection.BoundedClient:
        client = connection.make_client(
            self._address,
            client_id,
            clean=clean,
            max_inflight=self._limits.max_inflight,
            most_bytes=connection.most_bytes(self._limits),
        )
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe
        return client

    # -- connection loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the network thread and return at once. A :class:`Connected` or :class:`Disconnected` event follows."""
        self._thread.start()

    def stop(self, drain_s: float = 2.0) -> None:
        """Disconnect and stop the network thread. The broker does not publish the last will.

        Messages may be lost; wait for a :class:`Delivery` first if one must arrive.

        Args:
            drain_s: Seconds to wait for bytes that are not sent yet.
        """
        deadline = threading.Event()
        waited = 0.0
        while self._connected.is_set() and self._client.want_write() and waited < drain_s:
            deadline.wait(0.02)
            waited += 0.02
        self._client.disconnect()  # before the flag: it also wakes the network thread
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=drain_s + 1.0)

    @property
    def connected(self) -> bool:
        """True while the connection is established."""
        return self._connected.is_set()

    @property
    def version(self) -> str:
        """Version of MQTT of the current or last connection: 5 or 3.1.1."""
        return self._version

    def _run(self) -> None:
        """Connect again and again until :meth:`stop`, with growing pauses. Detects rivals and limits of the broker."""
        attempt = -1  # the first pause is the shortest, whether or not there ever was a connection
        moments = 0
        found: str | None = ""
        while not self._stopping.is_set():
            reason = self._connect_and_loop()
            was_up = self._connected.is_set()
            self._connected.clear()
            if self._stopping.is_set():
                return
            moments = moments + 1 if was_up and time.monotonic() - self._up_since < _MOMENT_S else 0
            is_brief = moments >= _RIVAL_AFTER
            found = found if is_brief else ""
            if is_brief and not found and "taken over" not in self._ended and self._largest[1]:
                found = find_limit(self._address, self._version, self._id, *self._largest)
            if found is None:  # the link breaks for every client
                moments = 0
            rival = is_brief and found is not None
            # Two clients that reconnect at full speed leave neither the time to work.
            attempt = 0 if was_up and not rival else attempt + 1
            pause = self._pause(attempt)
            limit = self._limit or found or ""
            if limit:
                reason = f"the broker at {self._address} {limit}"
            self._deliver(Disconnected(reason, pause, rival and not limit, limit))
            self._stopping.wait(pause)

    def _pause(self, attempt: int) -> float:
        """Return the pause before the next attempt, in seconds, random within the upper half of its range."""
        ceiling = min(self._limits.reconnect_max_s, self._limits.reconnect_min_s * 2.0 ** min(attempt, 16))
        return ceiling * (0.5 + 0.5 * self._rng.random())

    def _connect_and_loop(self) -> str:
        """Run one connection until it ends, if needed in the other version of MQTT. Return the reason for its end."""
        self._version = self._first
        reason = self._attempt()
        if self._stopping.is_set() or self._connected.is_set() or self._address.mqtt != "auto":
            return reason
        unsupported = self._refusal.startswith("Unsupported protocol version")
        if unsupported or (not self._refusal and self._ended == _UNANSWERED):
            # A broker of 3.1.1 says so, or hangs up on what it cannot read; so does one that is just being stopped.
            self._version = "3.1.1" if self._first == "5" else "5"
            reason = self._attempt()
            self._older += self._connected.is_set()
            if self._connected.is_set() and (unsupported or self._older > 1):
                self._first = self._version
        return reason

    def _attempt(self) -> str:
        """Run one connection in one version of MQTT until it ends. Return the reason for its end."""
        self._refusal = self._ended = self._limit = ""
        address, limits = self._address, self._limits
        try:
            if self._will is not None:
                will = self._will.current_will()
                self._client.will_set(will.topic, will.payload, qos=1, retain=True)
            connection.dial(
                self._client,
                address,
                self._version,
                clean=self._clean,
                keepalive_s=limits.keepalive_s,
                max_inflight=limits.max_inflight,
            )
        except (OSError, ValueError, OverflowError) as error:
            return connection.unreachable_text(address, error)
        started = time.monotonic()
        silent = reported = False
        code = paho.MQTT_ERR_SUCCESS
        while code == paho.MQTT_ERR_SUCCESS and not self._refusal and not self._stopping.is_set():
            try:
                code = self._client.loop(timeout=0.5)
            except Exception as error:  # of paho's parser: nothing that a broker sends may end the thread
                self._ended = f"the broker sent what cannot be read: {error}"
                break
            self._ask_again()
            if not self._connected.is_set() and not self._refusal and code == paho.MQTT_ERR_SUCCESS:
                waited = time.monotonic() - started
                if silent := waited > _ANSWER_S:
                    break  # the next attempt closes this connection
                if waited > _SILENT_S and not reported and self._version == self._first:
                    reported = True
                    reason = connection.unanswered_text(address, silent=True)
                    self._deliver(Disconnected(reason, _ANSWER_S - waited, waiting=True))
        if self._stopping.is_set():
            self._client.say_goodbye()
        if self._refusal:
            return connection.refusal_text(address, self._refusal)
        if self._client.foreign:
            self._ended = self._client.hung_up
            return connection.foreign_text(address, self._client.foreign)
        if not self._connected.is_set():
            self._ended = _UNANSWERED
            return connection.unanswered_text(address, silent=silent)
        why = self._client.hung_up or self._ended or paho.error_string(code).rstrip(".")
        return f"connection to the broker at {address} lost: {why}"

    # -- callbacks, on the network thread --------------------------------------------------------------------

    def _on_connect(
        self, _client: object, _data: object, flags: object, code: object, properties: object
    ) -> None:
        self._limit = announced_limit(code, properties)
        if self._limit or getattr(code, "is_failure", False):
            self._refusal = self._limit or connection.reason_of(code, properties)
            return
        resumed = bool(getattr(flags, "session_present", False))
        inflight = min(self._limits.max_inflight, connection.receive_maximum(properties))
        connection.allow_inflight(self._client, inflight)
        self._most_bytes = connection.largest_packet(properties)
        self._drop_too_large()
        self._up_since = time.monotonic()
        self._connected.set()
        with self._lock:
            self._waiting.clear()
            self._asked = []
            self._leaving.clear()
            self._denied.clear()
            # Even in a resumed session: the process may be new and know nothing of what is retained, or the
            # connection may have broken before it sent these. Subscribing twice changes nothing else.
            self._enqueue(list(self._standing.items()))
        self._deliver(Connected(resumed))

    def _on_disconnect(
        self, _client: object, _data: object, flags: object, code: object, properties: object
    ) -> None:
        if getattr(flags, "is_disconnect_packet_from_server", False):
            self._ended = f"the broker ended it: {connection.reason_of(code, properties)}"

    def _on_publish(self, _client: object, _data: object, mid: int, code: object, properties: object) -> None:
        if getattr(code, "is_failure", False):
            message = self._client._out_messages.get(mid)  # paho forgets it after this
            topic = message.topic if message is not None else "?"
            size = len(message.payload) if message is not None else 0
            limit = size_limit(size) if getattr(code, "value", 0) == _TOO_LARGE else ""
            self._deliver(Refusal("publish", topic, connection.reason_of(code, properties), limit))

    def _drop_too_large(self) -> None:
        """Remove queued messages that are too large for the broker, which would end each new connection because of them."""
        for mid, message in list(self._client._out_messages.items()):
            if not self._fits(message.topic, bytes(message.payload)):
                self._client._out_messages.pop(mid, None)
                message.info._set_as_published()

    def _fits(self, topic: str, payload: bytes) -> bool:
        """Return True if the broker accepts a message of this size. If it does not, deliver a :class:`Refusal`."""
        size = publish_bytes(topic, len(payload), 1) + _PROPERTIES_BYTES
        if not self._most_bytes or size <= self._most_bytes:
            return True
        self._deliver(Refusal("publish", topic, "Packet too large", size_limit(size, self._most_bytes)))
        return False

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        payload = bytes(message.payload)
        self.received_bytes += len(payload)
        self._deliver(IncomingMessage(message.topic, payload, bool(message.retain)))

    def _on_subscribe(
        self, _client: object, _data: object, _mid: int, codes: Sequence[object], properties: object
    ) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
            refused = [
                (topic, qos, connection.reason_of(code, properties))
                for (topic, qos), code in zip(asked, codes, strict=False)
                if getattr(code, "is_failure", False)
            ]
            self._denied.update((topic, qos) for topic, qos, _ in refused if topic in self._standing)
            self._ask_again_at = time.monotonic() + _ASK_AGAIN * self._limits.reconnect_max_s
            self._pump()
        for topic, _, reason in refused:
            self._deliver(Refusal("subscribe", topic, reason))

    def _on_unsubscribe(
        self, _client: object, _data: object, mid: int, codes: Sequence[object], properties: object
    ) -> None:
        with self._lock:
            topics = self._leaving.pop(mid, [])
        for topic, code in zip(topics, codes, strict=False):
            if getattr(code, "is_failure", False):
                self._deliver(Refusal("unsubscribe", topic, connection.reason_of(code, properties)))

    def _ask_again(self) -> None:
        """Repeat refused subscriptions once their pause is over."""
        if not self._denied or time.monotonic() < self._ask_again_at:
            return
        with self._lock:
            again, self._denied = list(self._denied.items()), {}
            self._enqueue([(topic, qos) for topic, qos in again if topic in self._standing])

    # -- public methods -------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str], qos: int = 1, *, standing: bool = True) -> None:
        """Subscribe to topics in small batches. Each batch waits for the broker's answer to the one before.

        Args:
            topics: Topic filters.
            qos: 0 or 1, combined with :data:`edgefl.wire.mqtt.connection.AS_PUBLISHED` if needed.
            standing: Repeat the subscription after each reconnect, which also returns retained messages again.
        """
        entries = [(topic, qos) for topic in topics]
        with self._lock:
            if standing:
                self._standing.update(entries)
            if self._connected.is_set() or not standing:
                self._enqueue(entries)

    def unsubscribe(self, topics: Iterable[str]) -> None:
        """Unsubscribe from topic filters, and do not subscribe to them again after a reconnect."""
        names = list(topics)
        with self._lock:
            for name in names:
                self._standing.pop(name, None)
            if names and self._connected.is_set():
                code, mid = self._client.unsubscribe(names)
                if code == paho.MQTT_ERR_SUCCESS and mid is not None:
                    self._leaving[mid] = names

    @property
    def settled(self) -> bool:
        """True if the broker has answered all subscriptions, so that no message is missed from now on."""
        with self._lock:
            return self.connected and not self._waiting and not self._asked

    def wake(self) -> None:
        """Deliver a :class:`Wakeup` event. Safe from any thread and from signal handlers."""
        self._deliver(Wakeup())

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False, expires_s: float = 0.0
    ) -> Delivery:
        """Queue a message and return at once. With QoS 1 it is sent again after a reconnect of this process.

        Args:
            topic: MQTT topic.
            payload: Payload.
            qos: 0 or 1.
            retain: The broker stores the message for later subscribers.
            expires_s: Seconds after which a broker of MQTT 5 drops the message for absent clients. 0: never.

        Returns:
            Handle of the message, already done if the broker does not accept its size.
        """
        if not self._fits(topic, payload):
            return Delivery(None)
        self.sent_bytes += len(payload)
        if len(payload) > self._largest[1]:
            self._largest = topic, len(payload)
        properties = connection.expiry_properties(expires_s) if expires_s > 0 else None
        info = self._client.publish(topic, payload, qos=qos, retain=retain, properties=properties)
        if qos > 0 and info.rc == paho.MQTT_ERR_NO_CONN:
            info.rc = paho.MQTT_ERR_SUCCESS  # paho queued it, and would still call it failed once it arrived
        return Delivery(info)

    def _enqueue(self, entries: list[tuple[str, int]]) -> None:
        """Queue subscriptions in batches and send the first batch. ``entries`` are pairs (topic filter, QoS and
        options).
        """
        for start in range(0, len(entries), _SUBSCRIBE_BATCH):
            self._waiting.append(entries[start : start + _SUBSCRIBE_BATCH])
        self._pump()

    def _pump(self) -> None:
        """Send the next batch of subscriptions if no answer is pending."""
        while self._waiting and not self._asked:
            self._asked = self._waiting.pop(0)
            code, _ = self._client.subscribe(connection.subscriptions(self._asked, self._version))
            if code != paho.MQTT_ERR_SUCCESS:  # not connected: the caller asks again after Up
                self._asked = []
                self._waiting.clear()
