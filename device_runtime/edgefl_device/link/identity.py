"""Who speaks: this device's own key, and the keys of the server that it listens to.

::

    speaker, server = speaker_of(folder, store), ServerTrust(store, pinned, say)
    session.publish(topic, speaker.seal(topic, message))
    task = server.open(Task, topic, payload)     # IdentityError: it is not the server's word, or a copy (Repeated)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from edgefl.errors import BundleError, IdentityError, StoreError
from edgefl.wire import keys
from edgefl.wire.bundle import archive
from edgefl.wire.mqtt.envelope import Envelope, MessageCounter, MessageSigner, unwrap, verified
from edgefl.wire.mqtt.messages import MALFORMED, AnyMessage, Message, Round, decode
from edgefl_device.store.beside import facts_in
from edgefl_device.store.database import Store

KEY_FILE = "device.key"
EXECUTABLE = frozenset({"executorch"})
"""Formats whose loading is as good as running code: never without a signature."""

_TRUST = "server-keys"
_HEARD = "server-numbers"
_NUMBERS = "numbers"
_MOST_KEYS = 16
"""Keys of servers whose numbers are remembered, those that are known apart: an owner may give one after the other."""

Say = Callable[[str, str], None]


class _Trusted(msgspec.Struct, frozen=True):
    """What a device remembers of whom it follows: its first key of the server, and what followed from that."""

    first: bytes = b""
    statements: tuple[keys.Succession, ...] = ()


class _Heard(msgspec.Struct):
    """The number of the last message by topic and key, and which key signed the last announcement.

    Each key has numbers of its own: whoever has another one cannot use them up.
    """

    numbers: dict[str, dict[bytes, int]] = {}
    announcer: bytes = b""


class Repeated(IdentityError):
    """What the server said last came once more, as brokers send it. Nothing is to be done, nor to be told."""

    def __init__(self, kind: type[Message], topic: str) -> None:
        super().__init__("repeated", f"a {kind.__name__} on {topic} came once more")


@dataclass(frozen=True)
class _StoredNumbers:
    """Numbers of a device's messages, in its store."""

    store: Store

    def number(self) -> int:
        return int(self.store.fact(_NUMBERS) or b"0")

    def keep_number(self, number: int) -> None:
        with suppress(StoreError):  # a full disk: the clock keeps the next process ahead of this one
            self.store.keep_fact(_NUMBERS, str(number).encode())


def speaker_of(folder: Path, store: Store) -> MessageSigner:
    """This device's voice; its key is made at the first start, and stays in ``folder``."""
    return MessageSigner(keys.KeyPair(folder / KEY_FILE), MessageCounter(_StoredNumbers(store)))


def follow(store: Store, agent: Path) -> None:
    """Have ``store`` follow whom the device's own one, in the folder ``agent``, follows, if it follows anybody.

    StoreError if that cannot be read: to trust whoever speaks first instead would be no answer.
    """
    facts = facts_in(agent, (_TRUST, _HEARD))
    if not _read(facts.get(_TRUST), _Trusted).first:
        return
    store.keep_fact(_TRUST, facts[_TRUST])
    if _HEARD in facts and store.fact(_HEARD) is None:
        store.keep_fact(_HEARD, facts[_HEARD])


class ServerTrust:
    """The keys of the server, and what it said last. Thread-safe.

    ``pinned`` are those that the device was given; without any, the first key that is seen is trusted from then on.
    """

    def __init__(
        self, store: Store, pinned: tuple[bytes, ...], say: Say, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._pinned = pinned
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._trusted = _read(store.fact(_TRUST), _Trusted)
        self._heard = _read(store.fact(_HEARD), _Heard)
        if pinned and self._trusted.first not in pinned:  # kept, for a start that is given none
            self._trusted = msgspec.structs.replace(self._trusted, first=pinned[0])
            self._keep()
        self._keys = self._known()
        self._announced = False
        self._bare = False

    @property
    def keys(self) -> frozenset[bytes]:
        """Those that are good now."""
        with self._lock:
            now = self._clock()
            return frozenset(key for key, until in self._keys.items() if now < until)

    def open(self, kind: type[AnyMessage], topic: str, payload: bytes) -> AnyMessage:
        """The server's message. IdentityError if a key is known, and it is not signed by one; ProtocolError if it is
        malformed. What was said before on the topic, and was followed by something else, is not said again. A first key is
        learnt from an announcement, which is what all devices see; until then all else is as good as unsigned.

        Repeated for a copy of the last one on the topic, also after a restart: the server says nothing twice, as an answer
        that it gives again has a number of its own. The announcement is retained: its first copy in a process is none.
        """
        envelope = unwrap(payload, kind)
        with self._lock:
            if envelope is None:
                return self._unsigned(kind, topic, payload)
            learnt = self._admitted(kind, envelope)
            message = verified(kind, topic, envelope)
            if learnt is not None:
                self._learn(learnt, envelope.key)
            if self._keys:
                self._in_order(kind, topic, envelope)
            return message

    def check_bundle(self, sha256: str, signature: bytes, format: str) -> None:
        """BundleError for a bundle that is not signed by a known key, where one is known, and for an executable one where
        none is."""
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

    def _unsigned(self, kind: type[AnyMessage], topic: str, payload: bytes) -> AnyMessage:
        if self._keys:
            raise IdentityError(
                "unsigned",
                f"a {kind.__name__} on {topic} is not signed, and this device knows the server's key: it is not acted on",
            )
        message = decode(kind, payload)
        if not self._bare:
            self._bare = True
            self._say(
                "server-key", "this server does not sign: whoever reaches the broker can be taken for it"
            )
        return message

    def _admitted(self, kind: type[Message], envelope: Envelope) -> _Trusted | None:
        """IdentityError unless the key is known, or becomes so: then what is to be remembered."""
        until = self._keys.get(envelope.key)
        if until is not None:
            if self._clock() < until:
                return None
            raise IdentityError(
                "old-key", f"server key {keys.shown(envelope.key)} was replaced and is not good any more"
            )
        if not self._keys:
            if not issubclass(kind, Round):
                return None
            return msgspec.structs.replace(self._trusted, first=envelope.key)
        if envelope.key in keys.known_after(self._keys, envelope.succession):
            statements = tuple(dict.fromkeys((*self._trusted.statements, *envelope.succession)))
            return msgspec.structs.replace(self._trusted, statements=statements)
        known = ", ".join(keys.shown(key) for key in self._keys)
        raise IdentityError(
            "unknown-key",
            f"signed by server key {envelope.key.hex()}, and this device knows {known}: if the server was given a new key "
            "on purpose, start the device with it as `server_key`; if not, somebody else speaks there",
        )

    def _learn(self, trusted: _Trusted, key: bytes) -> None:
        first = not self._keys
        self._trusted = trusted
        self._keys = self._known()
        self._keep()
        if first:
            text = f"trust on first use: this device follows the server with the key {key.hex()} from now on"
        else:
            text = f"the server has a new key {key.hex()}, which its old one introduced"
        self._say("server-key", text)

    def _in_order(self, kind: type[Message], topic: str, envelope: Envelope) -> None:
        """IdentityError for what the key said before something else, and for rounds of a key that another one followed."""
        key, at, announces = envelope.key, envelope.at, issubclass(kind, Round)
        # The server stands still while its key is rotated: the old one has announced its last round by then.
        if announces and self._keys.get(key) != keys.FOREVER:
            raise IdentityError(
                "old-key", f"server key {keys.shown(key)} was replaced and announces no rounds any more"
            )
        numbers = self._heard.numbers.get(topic, {})
        last = numbers.get(key, -1)
        if at < last or (announces and at == last and key != self._heard.announcer):
            raise IdentityError(
                "replayed",
                f"a {kind.__name__} on {topic} was said before, and something else after it: it is not acted on",
            )
        if at == last and (self._announced or not announces):
            raise Repeated(kind, topic)
        self._announced = self._announced or announces
        if at > last:
            self._heard.numbers[topic] = {**self._remembered(numbers), key: at}
            self._heard.announcer = key if announces else self._heard.announcer
            with suppress(StoreError):  # a full disk: it is known as long as this process lives
                self._store.keep_fact(_HEARD, msgspec.msgpack.encode(self._heard), durable=False)

    def _remembered(self, numbers: dict[bytes, int]) -> dict[bytes, int]:
        if len(numbers) < _MOST_KEYS:
            return numbers
        return {key: at for key, at in numbers.items() if key in self._keys}

    def _known(self) -> dict[bytes, int]:
        roots = self._pinned or ((self._trusted.first,) if self._trusted.first else ())
        return keys.known_after(dict.fromkeys(roots, keys.FOREVER), self._trusted.statements)

    def _keep(self) -> None:
        with suppress(StoreError):  # a full disk: it is known as long as this process lives
            self._store.keep_fact(_TRUST, msgspec.msgpack.encode(self._trusted))


_Kept = TypeVar("_Kept", _Trusted, _Heard)


def _read(data: bytes | None, kind: type[_Kept]) -> _Kept:
    try:
        return msgspec.msgpack.decode(data, type=kind) if data else kind()
    except MALFORMED:
        return kind()
