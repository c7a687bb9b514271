"""Bounded paho client: TLS, WebSocket, both versions of MQTT, and error texts with a remedy."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import suppress
from functools import lru_cache
from traceback import extract_tb

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from edgefl.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address

_SOCKET_BUFFER = 1 << 20
_SESSION_S = 7 * 24 * 3600
"""Seconds for which a broker of MQTT 5 keeps the session of an absent client. A broker of 3.1.1 decides itself."""
_VERSIONS = {"5": MQTTProtocolVersion.MQTTv5, "3.1.1": MQTTProtocolVersion.MQTTv311}
_LARGEST_RECEIVE_MAXIMUM = 65_535
AS_PUBLISHED = 8
"""Option of a subscription beside its QoS: a live message shows whether it is retained (MQTT 5)."""
_PUBLISH, _QOS_1, _QOS_2, _MORE = 3, 2, 4, 128
_HEADER_BYTES = 64 * 1024
"""Allowance for the fields around a payload. Only a PUBLISH may be larger than this."""
_READ_BYTES = 256 * 1024
_MOST_UNSENT = 50_000
"""Packets in the send queue at which a broker that reads none is disconnected: acknowledgements and our own messages."""
_GREETING_BYTES = 20
_FIRST_BYTES = b"\x20\xe0\xf0"
"""First byte of a broker's first packet: CONNACK, DISCONNECT or AUTH."""


class Delivery:
    """Handle of a published message, to wait for the broker's acknowledgement.

    A message that the broker refused counts as done. It also causes a :class:`Refusal` event.
    """

    def __init__(self, info: paho.MQTTMessageInfo | None) -> None:
        self._info = info

    def done(self) -> bool:
        """Return True if the broker has acknowledged or refused the message."""
        try:
            return self._info is None or bool(self._info.is_published())
        except (RuntimeError, ValueError):
            return False

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the acknowledgement. Return :meth:`done`."""
        if self._info is None:
            return True
        try:
            self._info.wait_for_publish(timeout_s)
        except (RuntimeError, ValueError):
            return False
        return self.done()


class BoundedClient(paho.Client):
    """paho client that disconnects before it buffers data that no honest broker sends.

    We subscribe with QoS 0 and 1. paho would buffer a message of QoS 2 until the broker releases it, and a packet of
    any size until it is complete.

    Attributes:
        most_bytes: Largest payload of a message.
        hung_up: Reason if this class ended the connection, else "".
        answered: True after the port sent any byte.
        foreign: First bytes of an answer that is not MQTT, else empty.
    """

    most_bytes = 0
    hung_up = ""
    answered = False
    foreign = b""

    def say_goodbye(self) -> None:
        """Send DISCONNECT and close the socket. Without that packet the broker keeps us connected until the keep-alive
        expires.
        """
        self.disconnect()
        with suppress(Exception):  # of paho's parser
            for _ in range(20):
                if self.socket() is None:
                    return
                self.loop(timeout=0.05)
        self._sock_close()

    def _sock_recv(self, bufsize: int) -> bytes:
        """Receive bytes for paho after checking the limits. paho calls it for each part of a packet.

        Raises:
            ConnectionAbortedError: The broker exceeds a limit. ``hung_up`` has the reason.
        """
        packet = self._in_packet
        if packet["have_remaining"] and not packet["packet"]:
            self._check(packet["command"], packet["remaining_length"])
        if len(self._out_packet) > _MOST_UNSENT:
            self._hang_up(f"the broker reads none of {_MOST_UNSENT} packets, and sends more")
        # In a WebSocket a frame is held until its end, whatever is in it.
        if len(getattr(self._sock, "_readbuffer", b"")) > self.most_bytes + _HEADER_BYTES:
            self._hang_up(f"the broker sent a frame of more than {self.most_bytes} bytes")
        # A socket reserves the number of bytes to read.
        data = super()._sock_recv(min(bufsize, _READ_BYTES))
        if data and not self.answered:
            self.answered = True
            if data[0] not in _FIRST_BYTES:
                self.foreign = data
                with suppress(OSError):
                    self.foreign += super()._sock_recv(_GREETING_BYTES)
                self._hang_up("the port speaks no MQTT")
        return data

    def _packet_handle(self) -> MQTTErrorCode:
        """Handle a complete packet. Reject a PUBLISH with more than 16 KiB of properties, which would take many times
        their size.
        """
        body = self._in_packet["packet"]
        if self._in_packet["command"] >> 4 == _PUBLISH and self._protocol == MQTTProtocolVersion.MQTTv5:
            at = 2 + int.from_bytes(body[:2]) + 2 * bool(self._in_packet["command"] & _QOS_1)
            if at + 2 < len(body) and body[at] & body[at + 1] & _MORE:
                self.hung_up = "the broker sent a message with properties of more than 16 KiB"
                return MQTTErrorCode.MQTT_ERR_PROTOCOL
        return super()._packet_handle()

    def _check(self, command: int, size: int) -> None:
        """End the connection if a packet has QoS 2 or is too large.

        Args:
            command: First byte of the packet: its type and flags.
            size: Number of bytes that follow the header.

        Raises:
            ConnectionAbortedError: The connection ends for one of these reasons.
        """
        if command >> 4 == _PUBLISH and command & _QOS_2:
            self._hang_up("the broker sent a message of QoS 2, which nobody asked for")
        most = self.most_bytes if command >> 4 == _PUBLISH else _HEADER_BYTES
        if size > most:
            self._hang_up(f"the broker sent a packet of {size} bytes, and {most} is the most that is read")

    def _hang_up(self, why: str) -> None:
        """Store the reason and end the connection by raising ConnectionAbortedError."""
        self.hung_up = why
        raise ConnectionAbortedError(why)


def most_bytes(limits: Limits) -> int:
    """Return the size in bytes of the largest packet that a client with these limits reads."""
    return limits.readable_bytes + _HEADER_BYTES


def make_client(
    address: Address, client_id: str, *, clean: bool, max_inflight: int, most_bytes: int
) -> BoundedClient:
    """Return a new client that is not connected.

    Args:
        address: Broker.
        client_id: MQTT client id.
        clean: Start without the session that the broker stored for this id.
        max_inflight: Most unacknowledged messages of QoS 1.
        most_bytes: Size of the largest packet to read.

    Raises:
        BrokerError: A certificate file cannot be used, or the password would be sent without TLS.
    """
    address.check()
    client = BoundedClient(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=clean,
        reconnect_on_failure=False,
        transport="websockets" if address.path else "tcp",
    )
    client.most_bytes = most_bytes
    allow_inflight(client, max_inflight)
    if address.path:
        client.ws_set_options(path=address.path)
    if address.username:
        client.username_pw_set(address.username, address.password or None)
    if address.secure:
        client.tls_set_context(_tls(address))
    client.on_socket_open = _widen_buffers
    # With a write callback registered, paho leaves all writing to our loop instead of the publishing thread.
    client.on_socket_register_write = lambda *_: None
    return client


def dial(
    client: BoundedClient, address: Address, version: str, *, clean: bool, keepalive_s: int, max_inflight: int
) -> None:
    """Open a new connection of ``client``. Messages in its queue are sent in the version of the new connection.

    Args:
        client: Client of :func:`make_client`.
        address: Broker.
        version: Version of MQTT, ``5`` or ``3.1.1``.
        clean: Start without the session that the broker stored for this id.
        keepalive_s: Keep-alive interval in seconds.
        max_inflight: Most unacknowledged messages of QoS 1. With version 5 it stays 1 until the caller reads the
            broker's CONNACK.

    Raises:
        OSError: The connection failed.
        ValueError: The address or the answer is malformed.
    """
    # paho takes the version of a client when it is made, and its queue cannot be moved to another one.
    client._protocol = _VERSIONS[version]
    client.hung_up, client.answered, client.foreign = "", False, b""
    if version == "3.1.1":
        allow_inflight(client, max_inflight)
        client.connect(address.host, address.port, keepalive=keepalive_s)
        return
    # Its CONNACK says how many may be on their way (the default of Mosquitto is 20); before it one always may.
    allow_inflight(client, 1)
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = 0 if clean else _SESSION_S
    properties.MaximumPacketSize = client.most_bytes
    client.connect(
        address.host, address.port, keepalive=keepalive_s, clean_start=clean, properties=properties
    )


def allow_inflight(client: paho.Client, most: int) -> None:
    """Set the largest number of unacknowledged QoS 1 messages of ``client``, also on an open connection."""
    # paho's own setter wants it before there is a connection, before the broker announces its maximum.
    client._max_inflight_messages = most


def receive_maximum(properties: object) -> int:
    """Return the most unacknowledged QoS 1 messages that the broker accepts, 65,535 if it names no number.

    Args:
        properties: Properties of the broker's CONNACK.
    """
    return int(getattr(properties, "ReceiveMaximum", _LARGEST_RECEIVE_MAXIMUM))


def largest_packet(properties: object) -> int:
    """Return the size of the largest packet that the broker accepts, from the properties of its CONNACK. 0: unlimited."""
    return int(getattr(properties, "MaximumPacketSize", 0))


def subscriptions(
    entries: list[tuple[str, int]], version: str
) -> list[tuple[str, int]] | list[tuple[str, SubscribeOptions]]:
    """Return topic filters in the form that paho's ``subscribe`` expects.

    Args:
        entries: Topic filters, each with its options byte (MQTT 5, 3.8.3.1).
        version: Version of MQTT. For ``3.1.1`` only the QoS is kept.
    """
    if version == "3.1.1":
        return [(topic, options & 3) for topic, options in entries]
    return [
        (topic, SubscribeOptions(qos=options & 3, retainAsPublished=bool(options & AS_PUBLISHED)))
        for topic, options in entries
    ]


def expiry_properties(seconds: float) -> Properties:
    """Return the properties of a PUBLISH that the broker drops after ``seconds``. Connections of MQTT 3.1.1 ignore them."""
    return _expiry_properties(max(1, min(round(seconds), 0xFFFF_FFFF)))


@lru_cache(maxsize=64)
def _expiry_properties(seconds: int) -> Properties:
    """Return the properties for whole seconds. They are cached, because building them takes longer than publishing a
    message.
    """
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.MessageExpiryInterval = seconds
    return properties


def reason_of(code: object, properties: object = None) -> str:
    """Return the text of a reason code, followed by the broker's own explanation if ``properties`` has one."""
    words = str(code)
    said = str(getattr(properties, "ReasonString", ""))
    return f"{words} ({said[:200]})" if said else words


def unreachable_text(address: Address, error: Exception) -> str:
    """Return the error text for a connection that failed with ``error``, with a remedy."""
    return f"cannot reach the broker at {address}: {error}{_unreachable_remedy(address, error)}"


def refusal_text(address: Address, reason: str) -> str:
    """Return the error text for a connection that the broker refused with ``reason``, with a remedy."""
    return f"the broker at {address} refused us: {reason}{_refusal_remedy(address, reason)}"


def foreign_text(address: Address, answer: bytes) -> str:
    """Return the error text for a TCP port that answered with something other than MQTT.

    Args:
        address: Address of the port.
        answer: First bytes of the answer, from which TLS, HTTP and SSH are recognized.
    """
    if answer.startswith(b"\x15\x03"):  # an alert of TLS
        return f"{address} speaks TLS: use mqtts://, or `--ca-file`"
    protocol = next((each for each in ("HTTP", "SSH") if answer.startswith(each.encode())), repr(answer)[1:])
    return f"no MQTT broker listens at {address}: the port answers {protocol}; correct the port"


def unanswered_text(address: Address, *, silent: bool) -> str:
    """Return the error text for a connection on which the broker sent no CONNACK.

    Args:
        address: Address of the broker.
        silent: True if the connection stayed open, False if the broker ended it.
    """
    if not address.secure:
        hint = "does it want TLS (mqtts://, or `--ca-file`)"
    elif not address.cert_file:
        hint = "is this port one for TLS, and does it want a client certificate (`--cert-file`)"
    else:
        hint = f"is this port one for TLS, and does its authority know {address.cert_file}"
    if silent:
        return f"{address} accepts connections and says nothing; does an MQTT broker listen there, or {hint}?"
    return (
        f"the broker at {address} ended the connection before it answered; {hint}, or has it as many connections as it "
        "allows (Mosquitto: `max_connections`)?"
    )


def _unreachable_remedy(address: Address, error: Exception) -> str:
    """Return the remedy for an error of the connection, "" if none is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in str(error):
            return f"; the broker's certificate is for another name than {address.host}: use the name that is in it"
        authority = (
            f"not of the authority in {address.ca_file}" if address.ca_file else "of no authority known here"
        )
        return f"; the broker's certificate is {authority}: name the PEM file of the right one (`--ca-file`)"
    unlike = isinstance(error, ConnectionResetError) or "handshake" in str(error)
    if isinstance(error, ssl.SSLError) or (address.secure and unlike):
        return "; is this port one for TLS?"
    if isinstance(error, paho.WebsocketConnectionError):
        return f"; does it serve MQTT over WebSocket at {address.path}?"
    return _network_remedy(error)


def _network_remedy(error: Exception) -> str:
    """Return the remedy for an error of the network or the host, "" if none is known."""
    if isinstance(error, ConnectionRefusedError):
        return "; does a broker run there, and listen on this port?"
    if isinstance(error, socket.gaierror):
        return "; is the name right, and does this machine have a network?"
    if getattr(error, "errno", 0) == errno.ENETUNREACH:
        return "; does this machine have a network?"
    if any(each.name == "_do_handshake" for each in extract_tb(error.__traceback__)):
        return "; the port accepts connections and speaks no WebSocket: correct the port, or use mqtt://"
    lost = isinstance(error, TimeoutError) or getattr(error, "errno", 0) == errno.EHOSTUNREACH
    return "; is that machine on, and does a firewall let this port through?" if lost else ""


def _refusal_remedy(address: Address, refusal: str) -> str:
    """Return the remedy if the broker rejected the credentials or the only version of MQTT, else ""."""
    if refusal.startswith("Unsupported protocol version") and address.mqtt != "auto":
        return (
            f"; it has no MQTT {address.mqtt}: leave `mqtt` out of its address, so that the version is found"
        )
    if not refusal.startswith(("Not authorized", "Bad user name or password")):
        return ""
    user = (
        f"it does not take user {address.username!r} with this password"
        if address.username
        else "it wants a user"
    )
    return f"; {user}: name it as user@host:port (`--broker`), its password by `--password-file` or EDGEFL_BROKER_PASSWORD"


def _tls(address: Address) -> ssl.SSLContext:
    """Return a TLS context (1.2 or newer) that verifies the broker's certificate and name. Raises BrokerError for a bad
    file.
    """
    try:
        context = ssl.create_default_context(cafile=address.ca_file or None)
    except (OSError, ValueError) as error:
        raise BrokerError(
            f"the certificate file {address.ca_file} cannot be used ({error}): give the PEM file of the broker's authority",
            ca_file=address.ca_file,
        ) from error
    if address.cert_file:
        try:
            # Without a password a key that wants one would ask the terminal.
            context.load_cert_chain(address.cert_file, address.key_file, password="")
        except (OSError, ValueError) as error:
            raise BrokerError(
                f"the client certificate {address.cert_file} with the key {address.key_file} cannot be used ({error}): give "
                "PEM files that belong together, the key without a password",
                cert_file=address.cert_file,
                key_file=address.key_file,
            ) from error
    if address.alpn:
        context.set_alpn_protocols([address.alpn])
    return context


def _widen_buffers(_client: object, _data: object, sock: object) -> None:
    """Enlarge the socket's buffers. paho calls it for each new socket."""
    if isinstance(sock, socket.socket):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
