"""One broker session, for both sides: stable client id, persistent session, own reconnect with jitter, last will.

Everything that happens arrives in order in :attr:`Session.inbox`; the network thread never runs user code. ::

    session = Session(Address("localhost", 1883), "edgefl-phone-7", limits=Limits(), will=Will(topic, payload))
    session.start()
    session.subscribe(["a/b"], qos=1)
    match session.inbox.get():
        case Up(resumed): ...
        case Incoming(topic, payload): ...
        case Down(reason): ...
"""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.wire.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address

__all__ = ["Address", "Delivery", "Down", "Event", "Incoming", "Session", "Up", "Will", "Woken"]

_SOCKET_BUFFER = 1 << 20
_SUBSCRIBE_BATCH = 8
_MOMENT_S = 5.0
_RIVAL_AFTER = 3
"""Connections in a row that last a moment only: a link that breaks does not do that by itself so regularly."""


@dataclass(frozen=True)
class Will:
    """What the broker says for us (retained) when we vanish."""

    topic: str
    payload: bytes


@dataclass(frozen=True)
class Up:
    """Connected. ``resumed`` is false when the broker knew nothing of us: publish and ask again."""

    resumed: bool


@dataclass(frozen=True)
class Down:
    """Not connected; a new attempt follows in ``retry_s`` seconds.

    ``rival``: connections are made and ended by the broker within moments, one after the other. MQTT 3.1.1 has no word for
    it, but this is what happens where two clients have one id: each takes the other's place.
    """

    reason: str
    retry_s: float
    rival: bool = False


@dataclass(frozen=True)
class Incoming:
    """A message that arrived."""

    topic: str
    payload: bytes


@dataclass(frozen=True)
class Woken:
    """Something in this process changed: whoever reads the events looks around (:meth:`Session.wake`)."""


Event = Up | Down | Incoming | Woken


class Delivery:
    """Handle of a published message: the broker has it once :meth:`done` says so."""

    def __init__(self, info: paho.MQTTMessageInfo) -> None:
        self._info = info

    def done(self) -> bool:
        try:
            return bool(self._info.is_published())
        except (RuntimeError, ValueError):
            return False

    def wait(self, timeout_s: float) -> bool:
        try:
            self._info.wait_for_publish(timeout_s)
        except (RuntimeError, ValueError):
            return False
        return self.done()


class Session:
    """A connection that mends itself. Thread-safe; ``start`` returns at once.

    ``will`` may be a function: each connection has its own then. ``clean``: the broker forgets us when we leave; for a
    client id that does not come again. ``deliver`` takes each event
    on the network thread, or on that of :meth:`wake`, in place of :attr:`inbox`; it must not wait.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        *,
        limits: Limits,
        will: Will | Callable[[], Will] | None = None,
        clean: bool = False,
        jitter: Callable[[], float] = random.random,
        deliver: Callable[[Event], None] | None = None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._deliver = self.inbox.put if deliver is None else deliver
        self.received_bytes = 0
        self.sent_bytes = 0
        self._address = address
        self._limits = limits
        self._jitter = jitter
        self._stopping = threading.Event()
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._standing: OrderedDict[str, int] = OrderedDict()
        self._waiting: list[list[tuple[str, int]]] = []
        self._subscribing = 0
        self._refusal = ""
        self._up_since = 0.0
        self._will = will
        self._client = self._make_client(client_id, clean)
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    def _make_client(self, client_id: str, clean: bool) -> paho.Client:
        client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, clean_session=clean, reconnect_on_failure=False
        )
        client.max_inflight_messages_set(self._limits.max_inflight)
        if self._address.username:
            client.username_pw_set(self._address.username, self._address.password)
        if self._address.ca_file:
            _use_tls(client, self._address.ca_file)
        client.on_connect = self._on_connect
        client.on_message = self._on_message
        client.on_subscribe = self._on_subscribe
        client.on_socket_open = _widen_buffers
        # With a write callback registered, paho leaves all writing to our loop instead of the publishing thread.
        client.on_socket_register_write = lambda *_: None
        return client

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float = 2.0) -> None:
        """Say goodbye (so the will stays unsaid) after giving bytes that wait for the network ``drain_s`` seconds.

        Whoever needs a message to arrive waits for its :class:`Delivery` first.
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
        return self._connected.is_set()

    def _run(self) -> None:
        attempt = -1  # the first pause is the shortest, whether or not there ever was a connection
        moments = 0
        while not self._stopping.is_set():
            reason = self._connect_and_loop()
            was_up = self._connected.is_set()
            self._connected.clear()
            if self._stopping.is_set():
                return
            moments = moments + 1 if was_up and time.monotonic() - self._up_since < _MOMENT_S else 0
            rival = moments >= _RIVAL_AFTER
            # Whoever fights for a name at full speed leaves neither side the time to work.
            attempt = 0 if was_up and not rival else attempt + 1
            pause = self._pause(attempt)
            self._deliver(Down(reason, pause, rival))
            self._stopping.wait(pause)

    def _pause(self, attempt: int) -> float:
        ceiling = min(self._limits.reconnect_max_s, self._limits.reconnect_min_s * 2.0 ** min(attempt, 16))
        return ceiling * (0.5 + 0.5 * self._jitter())

    def _connect_and_loop(self) -> str:
        """One connection from start to end; returns why it ended."""
        self._refusal = ""
        try:
            if self._will is not None:
                will = self._will() if callable(self._will) else self._will
                self._client.will_set(will.topic, will.payload, qos=1, retain=True)
            self._client.connect(self._address.host, self._address.port, keepalive=self._limits.keepalive_s)
        except (OSError, ValueError, OverflowError) as error:
            return f"cannot reach the broker at {self._address}: {error}"
        code = paho.MQTT_ERR_SUCCESS
        while code == paho.MQTT_ERR_SUCCESS and not self._stopping.is_set():
            code = self._client.loop(timeout=0.5)
        if self._stopping.is_set():
            self._say_goodbye()
        if self._refusal:
            return f"the broker at {self._address} refused us: {self._refusal}{_remedy(self._address, self._refusal)}"
        if not self._connected.is_set():
            tls = "is this port one for TLS?" if self._address.ca_file else "does it want TLS (`--ca-file`)?"
            return f"the broker at {self._address} ended the connection before it answered; {tls}"
        return f"connection to the broker at {self._address} lost: {paho.error_string(code).rstrip('.')}"

    def _say_goodbye(self) -> None:
        """Without it the socket stays open, and the broker believes us alive until the keep-alive runs out."""
        self._client.disconnect()
        for _ in range(20):
            if self._client.socket() is None:
                return
            self._client.loop(timeout=0.05)

    # -- callbacks, on the network thread --------------------------------------------------------------------

    def _on_connect(
        self, _client: object, _data: object, flags: object, code: object, _props: object
    ) -> None:
        if getattr(code, "is_failure", False):
            self._refusal = str(code)
            return
        resumed = bool(getattr(flags, "session_present", False))
        self._up_since = time.monotonic()
        self._connected.set()
        with self._lock:
            self._waiting.clear()
            self._subscribing = 0
            # Even in a resumed session: the process may be new and know nothing of what is retained, or the
            # connection may have broken before these were asked for. Subscribing twice changes nothing else.
            self._enqueue(list(self._standing.items()))
        self._deliver(Up(resumed))

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        payload = bytes(message.payload)
        self.received_bytes += len(payload)
        self._deliver(Incoming(message.topic, payload))

    def _on_subscribe(self, *_: object) -> None:
        with self._lock:
            self._subscribing = max(0, self._subscribing - 1)
            self._pump()

    # -- use -------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str], qos: int = 1, *, standing: bool = True) -> None:
        """Subscribe in small batches, the next when the broker has answered the last.

        ``standing`` subscriptions are asked for again after each connection, which also brings what is retained.
        """
        entries = [(topic, qos) for topic in topics]
        with self._lock:
            if standing:
                self._standing.update(entries)
            if self._connected.is_set() or not standing:
                self._enqueue(entries)

    def unsubscribe(self, topics: Iterable[str]) -> None:
        names = list(topics)
        with self._lock:
            for name in names:
                self._standing.pop(name, None)
        if names and self._connected.is_set():
            self._client.unsubscribe(names)

    def wake(self) -> None:
        """An event of our own, for whoever waits for the next one. Any thread may, and a signal's handler."""
        self._deliver(Woken())

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Delivery:
        """Queue a message; QoS 1 survives reconnects of this process."""
        self.sent_bytes += len(payload)
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if qos > 0 and info.rc == paho.MQTT_ERR_NO_CONN:
            info.rc = paho.MQTT_ERR_SUCCESS  # paho queued it, and would still call it failed once it arrived
        return Delivery(info)

    def _enqueue(self, entries: list[tuple[str, int]]) -> None:
        for start in range(0, len(entries), _SUBSCRIBE_BATCH):
            self._waiting.append(entries[start : start + _SUBSCRIBE_BATCH])
        self._pump()

    def _pump(self) -> None:
        while self._waiting and self._subscribing < 1:
            self._subscribing += 1
            code, _ = self._client.subscribe(self._waiting.pop(0))
            if code != paho.MQTT_ERR_SUCCESS:  # not connected: the caller asks again after Up
                self._subscribing = 0
                self._waiting.clear()


def _remedy(address: Address, refusal: str) -> str:
    """What to do where the broker does not know who we are."""
    if refusal not in ("Not authorized", "Bad user name or password"):
        return ""
    user = (
        f"it does not take user {address.username!r} with this password"
        if address.username
        else "it wants a user"
    )
    return f"; {user}: name it as user:password@host:port (`--broker`, or EDGEFL_BROKER)"


def _use_tls(client: paho.Client, ca_file: str) -> None:
    try:
        client.tls_set(ca_file)
    except (OSError, ValueError) as error:
        raise BrokerError(
            f"the certificate file {ca_file} cannot be used ({error}): give the PEM file of the broker's authority",
            ca_file=ca_file,
        ) from error


def _widen_buffers(_client: object, _data: object, sock: object) -> None:
    if isinstance(sock, socket.socket):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
