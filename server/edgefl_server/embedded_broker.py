"""MQTT broker in this process for one machine: amqtt with the fixes and limits that edgefl needs.

It queues messages for offline clients, but edgefl does not depend on that: important messages are retained or sent
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Coroutine
from typing import Any

from amqtt.adapters import ReaderAdapter, WriterAdapter
from amqtt.broker import Broker
from amqtt.errors import AMQTTError, MQTTError
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler
from amqtt.session import Session

from edgefl.errors import BrokerError
from edgefl.wire.mqtt.address import Address
from edgefl_server.broker import check_ports, check_private, message_bytes

_KEEPALIVE_GRACE = 1.5  # MQTT 3.1.1, 3.1.2.10: a client may be silent for this many keep-alives


QUEUE_BYTES = 64 * 2**20
"""Limit of one offline client's queue in the embedded broker, so that a device that never returns cannot fill the memory."""
_MESSAGE_BYTES = 512  # objects of one message that is held

_MQTT_5 = b"\x00\x04MQTT\x05"
_NOT_THIS_VERSION = b"\x20\x02\x00\x01"  # CONNACK of MQTT 3.1.1, 3.2: unacceptable protocol version
_REFUSED_5 = "MQTT 5 is refused: this broker speaks 3.1.1"


class _ConnectionStart(ReaderAdapter):
    """Reader of a new connection that inspects its first bytes, and returns them again to the next reader."""

    def __init__(self, reader: ReaderAdapter) -> None:
        self._reader = reader
        self._seen = b""

    async def speaks_mqtt_5(self) -> bool:
        """Return True if the connection begins with a CONNECT packet of MQTT 5. amqtt would never answer it.

        The bytes that were read are returned again by :meth:`read`.
        """
        try:
            self._seen = await self._reader.read(2)
            while self._seen[-1:] >= b"\x80" and len(self._seen) < 5:
                self._seen += await self._reader.read(1)
            named = await self._reader.read(len(_MQTT_5))
        except (asyncio.IncompleteReadError, ConnectionError):
            return False  # whoever reads on finds the same
        self._seen += named
        return bool(named == _MQTT_5)

    async def read(self, n: int = -1) -> bytes:
        seen, self._seen = (self._seen, b"") if n < 0 else (self._seen[:n], self._seen[n:])
        if n < 0 or len(seen) < n:
            seen += await self._reader.read(n if n < 0 else n - len(seen))
        return seen

    def feed_eof(self) -> None:
        self._reader.feed_eof()


class _Filters(dict[str, Any]):
    """Subscriptions by filter, with a short repr: amqtt formats it for a debug line at each SUBSCRIBE."""

    def __repr__(self) -> str:
        return f"<{len(self)} filters>"


class _MessageMemory:
    """Budget of ``most_bytes`` of memory, for retained messages and for those queued for offline clients."""

    def __init__(self, most_bytes: int) -> None:
        self._free = most_bytes

    def take(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` and return True; return False, without a change, if too little is free.

        A negative number releases memory.
        """
        if nbytes > self._free:
            return False
        self._free -= nbytes
        return True


class _Queue:
    """Messages for one offline client, the oldest first, as (topic, payload, QoS).

    A message that exceeds :data:`QUEUE_BYTES` or the memory budget ``room`` is dropped.
    """

    def __init__(self, room: _MessageMemory) -> None:
        self.messages: list[tuple[str, bytes, int]] = []
        self._room = room
        self._bytes = 0

    def add(self, topic: str, data: bytes, qos: int) -> None:
        size = _held_bytes(topic, data)
        if self._bytes + size <= QUEUE_BYTES and self._room.take(size):
            self._bytes += size
            self.messages.append((topic, data, qos))

    def empty(self) -> list[tuple[str, bytes, int]]:
        """Return all messages and remove them. Their memory becomes available again."""
        self._room.take(-self._bytes)
        messages, self.messages, self._bytes = self.messages, [], 0
        return messages


def _held_bytes(topic: str, data: bytes) -> int:
    return len(topic) + len(data) + _MESSAGE_BYTES


class LeanBroker(Broker):
    """amqtt 0.12.1 with the following changes.

    * A client receives retained messages when it subscribes to them. amqtt sent everything that matched any client's
      filter.
    * Filters without subscribers are removed. amqtt kept them and matched each message against them.
    * Messages are not formatted for debug lines that are never shown.
    * Retained messages are sent in parallel. amqtt waited for the PUBACK of each before it sent the next one.
    * A silent client is disconnected, and its will is sent. amqtt never noticed.
    * A client that reconnects while its old connection still exists keeps its session. amqtt sent its will, and no
      messages.
    * A client of MQTT 5 is refused, so that it can connect with 3.1.1. amqtt did not answer it.
    * A client with a persistent session gets the messages that it missed when it reconnects. amqtt had no queue for
      anonymous clients. A clean session ends with its connection.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.logger.addFilter(_is_news)
        self._subscriptions = _Filters()
        self._wildcards: dict[str, list[str]] = {}
        self._sending: set[asyncio.Task[Any]] = set()
        self._greeting: set[str | None] = set()
        self._replaced: weakref.WeakSet[BrokerProtocolHandler] = weakref.WeakSet()
        self._live: dict[str | None, BrokerProtocolHandler] = {}
        self._room = _MessageMemory(message_bytes())
        self._queues: defaultdict[str | None, _Queue] = defaultdict(lambda: _Queue(self._room))

    @classmethod
    def _split_bindaddr_port(cls, port_str: str, default_port: int) -> tuple[str | None, int]:
        host, port = super()._split_bindaddr_port(port_str, default_port)
        return host and host.strip("[]"), port  # asyncio takes an IPv6 address without its brackets

    # -- connections -----------------------------------------------------------------------------------------

    async def _initialize_client_session(
        self, reader: ReaderAdapter, writer: WriterAdapter, remote_address: str, remote_port: int
    ) -> tuple[BrokerProtocolHandler, Session]:
        opening = _ConnectionStart(reader)
        if await opening.speaks_mqtt_5():
            writer.write(_NOT_THIS_VERSION)
            await writer.drain()
            await writer.close()
            raise MQTTError(_REFUSED_5)
        handler, session = await super()._initialize_client_session(
            opening, writer, remote_address, remote_port
        )
        known, old = self._sessions.get(session.client_id or "", (None, None))
        if known is session and old is not None and session.transitions.is_connected():
            self._replaced.add(old)
        session.keep_alive = int(session.keep_alive * _KEEPALIVE_GRACE)
        handler.handle_read_timeout = lambda: self._spawn(handler.handle_connection_closed())
        self._greeting.add(session.client_id)
        return handler, session

    async def _authenticate(self, session: Session, listener: Any) -> bool:
        authenticated: bool = await super()._authenticate(session, listener)
        session.is_anonymous = (
            False  # amqtt forgets the session of an anonymous client that is offline for a second
        )
        return authenticated

    async def _delete_session(self, client_id: str) -> None:
        known, old = self._sessions.get(client_id, (None, None))
        if known is not None and old is not None and known.transitions.is_connected():
            self._replaced.add(old)
            self._spawn(old.handle_connection_closed())
        self._queues.pop(client_id, _Queue(self._room)).empty()
        await super()._delete_session(client_id)

    async def _handle_disconnect(
        self, client_session: Session, handler: BrokerProtocolHandler, disconnect_waiter: asyncio.Future[Any]
    ) -> None:
        """End a connection. If a newer connection of the same client took over, send no will and keep the session."""
        self._leave(client_session, handler)
        if handler in self._replaced:
            await self._stop_handler(handler)
            return
        await super()._handle_disconnect(client_session, handler, disconnect_waiter)
        if client_session.client_id in self._live:  # it took over while the old connection was closing
            client_session.transitions.connect()
        elif client_session.clean_session and self._get_handler(client_session) is handler:
            await self._delete_session(client_session.client_id or "")

    async def _client_message_loop(self, client_session: Session, handler: BrokerProtocolHandler) -> None:
        self._greeting.discard(client_session.client_id)
        if not client_session.transitions.is_connected():  # an old connection closed during the takeover
            client_session.transitions.connect()
        self._live[client_session.client_id] = handler
        self._send_queued(client_session)
        try:
            await super()._client_message_loop(client_session, handler)
        finally:
            self._leave(client_session, handler)

    def _leave(self, session: Session, handler: BrokerProtocolHandler) -> None:
        """Stop sending messages over this connection, if it is the current one of the session. Does nothing otherwise."""
        if self._live.get(session.client_id) is handler:
            del self._live[session.client_id]

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` as a task. A failure is logged at debug level only, because lost connections are common."""
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._discard_task)

    def _discard_task(self, task: asyncio.Task[Any]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.logger.debug("a message was not delivered: %r", error)

    # -- subscriptions ---------------------------------------------------------------------------------------

    async def add_subscription(self, subscription: tuple[str, int], session: Session) -> int:
        code: int = await super().add_subscription(subscription, session)
        levels = subscription[0].split("/")
        if subscription[0] in self._subscriptions and ("+" in levels or "#" in levels):
            self._wildcards[subscription[0]] = levels
        return code

    def _del_subscription(self, a_filter: str, session: Session) -> int:
        deleted: int = super()._del_subscription(a_filter, session)
        if not self._subscriptions.get(a_filter, True):
            del self._subscriptions[a_filter]
            self._wildcards.pop(a_filter, None)
        return deleted

    async def _del_all_subscriptions(self, session: Session) -> None:
        for a_filter in list(self._subscriptions):
            self._del_subscription(a_filter, session)

    async def _topic_filtering(self, session: Session, topic: str, action: Any) -> bool:
        return True  # no access rules: whoever needs them runs a broker of their own

    # -- messages --------------------------------------------------------------------------------------------

    async def _run_broadcast(self, running_tasks: deque[Any]) -> None:
        """Wait for the next message, and send it to all sessions whose filters match its topic."""
        message = await self._broadcast_queue.get()
        topic, data = message["topic"], message["data"]
        filters = [name for name, levels in self._wildcards.items() if _matches(levels, topic)]
        for name in (topic, *filters):
            for session, qos in self._subscriptions.get(name, ()):
                self._send(session, topic, data, message.get("qos", qos))

    def _send(self, session: Session, topic: str, data: bytes, qos: int) -> None:
        """Send a message to a connected client, or queue it for an offline one with a persistent session."""
        handler = self._live.get(session.client_id)
        if handler is not None:
            self._spawn(self._deliver(session, handler, topic, data, qos))
        elif qos and not session.clean_session:
            self._queues[session.client_id].add(topic, data, qos)

    async def _deliver(
        self, session: Session, handler: BrokerProtocolHandler, topic: str, data: bytes, qos: int
    ) -> None:
        """Send a message over one connection. Queue it if the connection ends before the client acknowledges it."""
        try:
            await handler.mqtt_publish(topic, data, qos, retain=False)
        except (Exception, asyncio.CancelledError):
            if qos and not session.clean_session:
                self._queues[session.client_id].add(topic, data, qos)
                # The client may be back already, and would otherwise wait for its next connection.
                if handler is not self._live.get(session.client_id):
                    self._send_queued(session)
            raise

    def _send_queued(self, session: Session) -> None:
        for message in self._queues.pop(session.client_id, _Queue(self._room)).empty():
            self._send(session, *message)

    async def retain_message(
        self, source_session: Session | None, topic_name: str, data: bytes, qos: int | None = None
    ) -> None:
        known = self._retained_messages.get(topic_name)
        grown = _held_bytes(topic_name, data) if data else 0
        grown -= _held_bytes(topic_name, known.data) if known else 0
        if self._room.take(grown):
            await super().retain_message(source_session, topic_name, data, qos)
        else:
            self.logger.warning("the memory for messages is full: %.99r is not retained", topic_name)

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        name, qos = subscription
        handler = self._get_handler(session)
        if (
            handler is None or session.client_id in self._greeting
        ):  # amqtt tries everybody's filters on connect
            return
        levels = self._wildcards.get(name)
        topics = [name] if levels is None else [t for t in self._retained_messages if _matches(levels, t)]
        for topic in topics:
            message = self._retained_messages.get(topic)
            if message is not None:
                wanted = min(qos, message.qos or 0)
                self._spawn(handler.mqtt_publish(topic, message.data, wanted, retain=True))


def _matches(levels: list[str], topic: str) -> bool:
    """Return True if the topic filter with these ``levels`` matches ``topic`` (MQTT 3.1.1, 4.7).

    ``+`` matches one level, ``#`` all remaining ones; neither matches topics that begin with ``$``.
    """
    parts = topic.split("/")
    if topic.startswith("$") and levels[0] in ("+", "#"):
        return False
    for level, part in zip(levels, parts, strict=False):
        if level == "#":
            return True
        if level not in ("+", part):
            return False
    return len(levels) == len(parts) or (len(levels) == len(parts) + 1 and levels[-1] == "#")


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for amqtt's log line about a refused MQTT 5 client, which every client of edgefl causes, else True."""
    return not record.getMessage().endswith(_REFUSED_5)


def run_amqtt(host: str, port: int, websocket_port: int = 0) -> None:
    """Run the broker until it is interrupted.

    Args:
        host: Address to listen on; it must be a loopback address.
        port: TCP port.
        websocket_port: Port of MQTT over WebSocket; 0 for none.

    Raises:
        BrokerError: If ``host`` is not loopback, or a port is in use.
    """
    check_private(host)
    check_ports(host, port, websocket_port)
    for name in ("amqtt", "transitions", "websockets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(host, port, websocket_port))


async def _serve(host: str, port: int, websocket_port: int) -> None:
    listeners = {"default": {"type": "tcp", "bind": str(Address(host, port))}}
    if websocket_port:
        listeners["browsers"] = {"type": "ws", "bind": str(Address(host, websocket_port))}
    broker = LeanBroker(
        {
            "listeners": listeners,
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    try:
        await broker.start()
    except AMQTTError as error:
        raise BrokerError(
            f"the broker cannot listen on {host}:{port} ({error}); choose another port", port=port
        ) from error
    try:
        await asyncio.Event().wait()
    finally:
        await broker.shutdown()
