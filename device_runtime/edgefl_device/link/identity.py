"""Identities: this device's own key, and the trusted keys of the server.

::

    session = SignedSession(Session(...), load_signer(folder, store))
    trust = ServerTrust(store, pinned_keys, log)
    session.publish(topic, message)
    task = trust.open(Task, topic, payload)     # IdentityError: not signed by the server, or a copy (DuplicateMessageError)
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from edgefl.errors import BundleError, IdentityError, StoreError
from edgefl.wire import keys
from edgefl.wire.bundle import archive
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.envelope import Envelope, MessageCounter, MessageSigner, unwrap, verify_envelope
from edgefl.wire.mqtt.messages import MALFORMED, AnyMessage, Message, Round, decode, encode
from edgefl.wire.mqtt.session import Session
from edgefl_device.config import DeviceLog
from edgefl_device.store.database import Store, facts_in

KEY_FILE = "device.key"
EXECUTABLE = frozenset({"executorch"})
"""Formats whose loading is as good as running code: never without a signature."""

_TRUST = "server-keys"
_HEARD = "server-numbers"
_NUMBERS = "numbers"
_MOST_KEYS = 16
"""Keys of servers whose numbers are remembered, besides the trusted ones: an owner may give one after the other."""


class _StoredTrust(msgspec.Struct, frozen=True):
    """Trust in the server as it is stored: its first key, and the signed statements with which later keys replaced it."""

    first: bytes = b""
    statements: tuple[keys.Succession, ...] = ()


class _LastMessageNumbers(msgspec.Struct):
    """Number of the last message by topic and key, and the key that signed the last announcement.

    Numbers are counted per key, so that the holder of another key cannot use them up.
    """

    numbers: dict[str, dict[bytes, int]] = {}
    announcer: bytes = b""


class DuplicateMessageError(IdentityError):
    """Copy of the server's last message on a topic, which brokers may deliver twice. Ignore it without a report."""

    def __init__(self, kind: type[Message], topic: str) -> None:
        super().__init__("repeated", f"a {kind.__name__} on {topic} came once more")


class SignedSession:
    """Session that signs the messages it publishes. Thread-safe.

    Args:
        session: The connection to the broker.
        signer: Signs messages; None publishes them unsigned.
    """

    def __init__(self, session: Session, signer: MessageSigner | None = None) -> None:
        self.session = session
        self._signer = signer

    @property
    def connected(self) -> bool:
        """True while the broker is connected."""
        return self.session.connected

    def wake(self) -> None:
        """Wake the reader of the session's events."""
        self.session.wake()

    def seal(self, topic: str, message: Message) -> bytes:
        """Return the payload of ``message``: its signed envelope, or the plain message without a signer."""
        return encode(message) if self._signer is None else self._signer.seal(topic, message)

    def publish(self, topic: str, message: Message, *, qos: int = 1, retain: bool = False) -> Delivery:
        """Sign ``message`` and publish it on ``topic``. Return its delivery, whose ``wait`` blocks until the broker has
        confirmed it.

        ``qos`` and ``retain`` as in MQTT.
        """
        return self.publish_payload(topic, self.seal(topic, message), qos=qos, retain=retain)

    def publish_payload(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Delivery:
        """Publish a payload that :meth:`seal` returned, and return its delivery, whose ``wait`` blocks until the
        broker confirmed it.

        ``qos`` and ``retain`` as in MQTT.
        """
        return self.session.publish(topic, payload, qos=qos, retain=retain)


@dataclass(frozen=True)
class _StoredNumbers:
    """Storage of the last message numbers of this device, in its store."""

    store: Store

    def number(self) -> int:
        return int(self.store.fact(_NUMBERS) or b"0")

    def keep_number(self, number: int) -> None:
        with suppress(StoreError):  # a full disk: the clock keeps the next process ahead of this one
            self.store.keep_fact(_NUMBERS, str(number).encode())


def load_signer(folder: Path, store: Store) -> MessageSigner:
    """Return the signer of this device's messages. At the first start its key is created in ``folder``."""
    return MessageSigner(keys.KeyPair(folder / KEY_FILE), MessageCounter(_StoredNumbers(store)))


def copy_trust(store: Store, agent: Path) -> None:
    """Copy the trusted server keys from the agent's store in folder ``agent`` into ``store``, if the agent has any.

    Raises:
        StoreError: The agent's store cannot be read. Trusting the first received key instead would be unsafe.
    """
    facts = facts_in(agent, (_TRUST, _HEARD))
    if not _read(facts.get(_TRUST), _StoredTrust).first:
        return
    store.keep_fact(_TRUST, facts[_TRUST])
    if _HEARD in facts and store.fact(_HEARD) is None:
        store.keep_fact(_HEARD, facts[_HEARD])


class ServerTrust:
    """Trusted keys of the server, and the numbers of its last messages. Thread-safe.

    Args:
        store: Storage of both.
        pinned: Keys from the device's configuration; without any, the first key that is seen is trusted from then
            on.
        log: Receives changes of trust.
    """

    def __init__(self, store: Store, pinned: tuple[bytes, ...], log: DeviceLog) -> None:
        self._store = store
        self._pinned = pinned
        self._log = log
        self._lock = threading.Lock()
        self._trusted = _read(store.fact(_TRUST), _StoredTrust)
        self._last = _read(store.fact(_HEARD), _LastMessageNumbers)
        if pinned and self._trusted.first not in pinned:  # stored for a start without a configured key
            self._trusted = msgspec.structs.replace(self._trusted, first=pinned[0])
            self._keep()
        self._keys = self._known()
        self._announced = False
        self._reported_unsigned = False

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys that are valid now."""
        with self._lock:
            now = time.time()
            return frozenset(key for key, until in self._keys.items() if now < until)

    def open(self, kind: type[AnyMessage], topic: str, payload: bytes) -> AnyMessage:
        """Verify and return a message of the server.

        The first key is accepted from an announcement, which all devices see; until then other messages count as
        unsigned.

        Args:
            kind: Type of the message.
            topic: Topic on which it arrived.
            payload: Its bytes.

        Raises:
            IdentityError: A key is trusted and did not sign the message, or the message is older than the last
                one.
            DuplicateMessageError: It is a copy of the last message on the topic, also after a restart: each message has a
                number of its own. The announcement is retained, so its first copy in a process is no repetition.
            ProtocolError: The message is malformed.
        """
        envelope = unwrap(payload, kind)
        with self._lock:
            if envelope is None:
                return self._open_unsigned(kind, topic, payload)
            learnt = self._admit(kind, envelope)
            message = verify_envelope(kind, topic, envelope)
            if learnt is not None:
                self._learn(learnt, envelope.key)
            if self._keys:
                self._check_order(kind, topic, envelope)
            return message

    def check_bundle(self, sha256: str, signature: bytes, format: str) -> None:
        """Check the signature of a bundle.

        Args:
            sha256: Digest of the bundle's manifest.
            signature: Signature from the announcement; b"" if there is none.
            format: Format of its graphs.

        Raises:
            BundleError: No trusted key signed it; or no key is trusted and loading this format runs native code.
        """
        known = self.keys
        if known:
            archive.check(known, sha256, signature)
        elif format in EXECUTABLE:
            raise BundleError(
                f"bundle {sha256[:12]} is in format {format}, whose loading is as good as running its code, and this device "
                "knows no key of a server: it is not loaded; give the device the server's key by `server_key`, or let the "
                "server sign",
                sha256=sha256,
                format=format,
            )

    def _open_unsigned(self, kind: type[AnyMessage], topic: str, payload: bytes) -> AnyMessage:
        if self._keys:
            raise IdentityError(
                "unsigned",
                f"a {kind.__name__} on {topic} is not signed, and this device knows the server's key: it is not acted on",
            )
        message = decode(kind, payload)
        if not self._reported_unsigned:
            self._reported_unsigned = True
            self._log.event(
                "server-key", "this server does not sign: whoever reaches the broker can be taken for it"
            )
        return message

    def _admit(self, kind: type[Message], envelope: Envelope) -> _StoredTrust | None:
        """Return the trust to store if a message was signed by a new valid key, else None. IdentityError if the key is
        unknown.

        ``kind`` is the message's type, ``envelope`` has its key and signature.
        """
        until = self._keys.get(envelope.key)
        if until is not None:
            if time.time() < until:
                return None
            raise IdentityError(
                "old-key", f"server key {keys.short_key(envelope.key)} was replaced and is not good any more"
            )
        if not self._keys:
            if not issubclass(kind, Round):
                return None
            return msgspec.structs.replace(self._trusted, first=envelope.key)
        if envelope.key in keys.apply_successions(self._keys, envelope.succession):
            statements = tuple(dict.fromkeys((*self._trusted.statements, *envelope.succession)))
            return msgspec.structs.replace(self._trusted, statements=statements)
        known = ", ".join(keys.short_key(key) for key in self._keys)
        raise IdentityError(
            "unknown-key",
            f"signed by server key {envelope.key.hex()}, and this device knows {known}: if the server was given a new key "
            "on purpose, start the device with it as `server_key`; if not, somebody else speaks there",
        )

    def _learn(self, trusted: _StoredTrust, key: bytes) -> None:
        first = not self._keys
        self._trusted = trusted
        self._keys = self._known()
        self._keep()
        if first:
            text = f"trust on first use: this device follows the server with the key {key.hex()} from now on"
        else:
            text = f"the server has a new key {key.hex()}, which its old one introduced"
        self._log.event("server-key", text)

    def _check_order(self, kind: type[Message], topic: str, envelope: Envelope) -> None:
        """Raise IdentityError for a message older than the key's last one on ``topic``, and for announcements by a
        replaced key.

        Raise DuplicateMessageError for a copy of the last message. ``kind`` is the message's type, ``envelope`` has
        its key and number.
        """
        key, at, announces = envelope.key, envelope.at, issubclass(kind, Round)
        # The server is stopped while its key is rotated: the old one has announced its last round by then.
        if announces and self._keys.get(key) != keys.FOREVER:
            raise IdentityError(
                "old-key", f"server key {keys.short_key(key)} was replaced and announces no rounds any more"
            )
        numbers = self._last.numbers.get(topic, {})
        last = numbers.get(key, -1)
        if at < last or (announces and at == last and key != self._last.announcer):
            raise IdentityError(
                "replayed",
                f"a {kind.__name__} on {topic} was said before, and something else after it: it is not acted on",
            )
        if at == last and (self._announced or not announces):
            raise DuplicateMessageError(kind, topic)
        self._announced = self._announced or announces
        if at > last:
            if len(numbers) >= _MOST_KEYS:
                numbers = {each: number for each, number in numbers.items() if each in self._keys}
            self._last.numbers[topic] = {**numbers, key: at}
            self._last.announcer = key if announces else self._last.announcer
            with suppress(StoreError):  # a full disk: it is known as long as this process lives
                self._store.keep_fact(_HEARD, msgspec.msgpack.encode(self._last), durable=False)

    def _known(self) -> dict[bytes, int]:
        roots = self._pinned or ((self._trusted.first,) if self._trusted.first else ())
        return keys.apply_successions(dict.fromkeys(roots, keys.FOREVER), self._trusted.statements)

    def _keep(self) -> None:
        with suppress(StoreError):  # a full disk: it is known as long as this process lives
            self._store.keep_fact(_TRUST, msgspec.msgpack.encode(self._trusted))


_Kept = TypeVar("_Kept", _StoredTrust, _LastMessageNumbers)


def _read(data: bytes | None, kind: type[_Kept]) -> _Kept:
    try:
        return msgspec.msgpack.decode(data, type=kind) if data else kind()
    except MALFORMED:
        return kind()
