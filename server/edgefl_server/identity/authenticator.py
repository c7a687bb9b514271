"""Authenticator of devices' messages: checks keys, their validity, and message numbers against replays.

Without enrolment, the first key that signs a hello under a name is trusted from then on (trust on first use). With
enrolment, only listed keys are trusted. Nothing of a message is stored before it is accepted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic

from edgefl.errors import ConfigError, IdentityError, ProtocolError, StoreError
from edgefl.system.clock import Clock
from edgefl.wire.enrolment import proves
from edgefl.wire.keys import FOREVER, apply_successions, short_key
from edgefl.wire.mqtt.envelope import Envelope, unwrap, verify_envelope
from edgefl.wire.mqtt.messages import AnyMessage, Hello, Message, Status, UpdateChunk, decode
from edgefl_server.events import EventListener, Noted
from edgefl_server.identity.buffered_registry import BufferedRegistry
from edgefl_server.identity.registry import DeviceKey, Registry, Source

_MAX_REPORTED = 1024
_MAX_EARLY = 1024
_MAX_NUMBERS = 100_000
_MAX_NAMES = 100_000
_NOTICES: dict[Source, str] = {
    "token": "device {device} is enrolled by a token, with the key {key}",
    "rotation": "device {device} has a new key {key}, which its old one introduced",
    "first-use": "trust on first use: device {device} is who has the key {key} from now on",
}
_BETWEEN_ROTATIONS_S = 60.0
"""Shortest time between two rotations of a device's key: each adds a row, and waits for the disk."""


@dataclass(frozen=True)
class _KeyEntry:
    """New key to add to the registry.

    Attributes:
        source: Why the key is trusted.
        until: Epoch seconds until which the device's previous key stays valid.
        token: Name of the enrolment token that permits the key, or empty.
    """

    source: Source
    until: int = 0
    token: str = ""


@dataclass(frozen=True)
class VerifiedMessage(Generic[AnyMessage]):
    """Message that passed :meth:`Authenticator.verify`.

    Attributes:
        device: Name of the device.
        message: The message.
        envelope: Its signature; None if devices need not sign.
        known: Registered key that signed it; None for a new key.
        entry: New key that the message introduces; None for a known key.
        is_copy: True if it was accepted before: brokers deliver retained messages and repeat others.
    """

    device: str
    message: AnyMessage
    envelope: Envelope | None = None
    known: DeviceKey | None = None
    entry: _KeyEntry | None = None
    is_copy: bool = False


class Authenticator:
    """Authenticator of the messages of one federation's devices.

    Args:
        registry: Keys of the devices.
        events: Receives a notice of each key that is trusted from now on.
        enrolled: True if only keys of the registry are trusted; False to trust the first key of a name.
        clock: Epoch seconds.
    """

    def __init__(
        self, registry: Registry, events: EventListener, *, enrolled: bool, clock: Clock = time.time
    ) -> None:
        self._registry = BufferedRegistry(registry, clock)
        self._events = events
        self._enrolled = enrolled
        self._clock = clock
        self._numbers: OrderedDict[tuple[str, bytes, type[Message]], int] = OrderedDict()
        """Number of the last message of each kind, by device and key."""
        self._reported: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._early: OrderedDict[tuple[str, bytes], tuple[str, bytes]] = OrderedDict()
        self._newcomers: dict[str, bytes] = {}

    def open(self, kind: type[AnyMessage], device: str, topic: str, payload: bytes) -> AnyMessage:
        """Verify a message as :meth:`verify` does, accept it, and return the decoded message.

        Args:
            kind: Expected type.
            device: Device in the topic.
            topic: Topic of the message, which is part of what was signed.
            payload: The envelope, or the bare message of a device that does not sign.

        Raises:
            IdentityError: If the device did not sign the message, if it is a replay, or if its new key was revoked.
            ProtocolError: If the message is malformed.
        """
        verified_message = self.verify(kind, device, topic, payload)
        self.accept(verified_message)
        return verified_message.message

    def verify(
        self,
        kind: type[AnyMessage],
        device: str,
        topic: str,
        payload: bytes,
        *,
        max_devices: int = _MAX_NAMES,
    ) -> VerifiedMessage[AnyMessage]:
        """Verify the signature and the message number of a message. Nothing is changed before :meth:`accept`.

        Only a status by an unknown key is kept in memory, until the hello of that key arrives.

        Args:
            kind: Expected type.
            device: Device in the topic.
            topic: Topic of the message, which is part of what was signed.
            payload: The envelope, or the bare message of a device that does not sign.
            max_devices: Largest number of names that are trusted on first use.

        Raises:
            IdentityError: If the device did not sign the message, if it is a replay, or if there are too many names.
            ProtocolError: If the message is malformed.
        """
        envelope = unwrap(payload, kind)
        keys = self._registry.keys(device)
        if envelope is None:
            if self._enrolled or keys:
                raise unsigned_error(kind, device, enrolled=self._enrolled)
            return VerifiedMessage(device, decode(kind, payload))
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and not issubclass(kind, Hello):
            if self._enrolled or keys:
                if issubclass(kind, Status):
                    self._keep_early(device, envelope.key, topic, payload)
                raise unknown_key(device, envelope, keys)
            # Nothing is stored of a name without a hello, not even the number of its message.
            return VerifiedMessage(device, verify_envelope(kind, topic, envelope))
        if known is not None:
            check_valid(device, known, self._clock())
        message = verify_envelope(kind, topic, envelope)
        entry = None
        if known is None and isinstance(message, Hello):
            entry = self._entry(device, topic, message, envelope, keys, max_devices)
        # Chunks are sent again in any order: the task's nonce and the digest identify copies of them.
        is_copy = not issubclass(kind, UpdateChunk) and self._is_copy(kind, device, envelope, known)
        return VerifiedMessage(device, message, envelope, known, entry, is_copy)

    def accept(self, verified_message: VerifiedMessage[AnyMessage]) -> None:
        """Store the new key that a verified message introduces, and the message's number, against replays.

        If the disk is full, they are kept in memory and stored later (:meth:`take_error`).

        Raises:
            IdentityError: If the new key was revoked.
        """
        self._registry.retry()
        device, envelope, entry = verified_message.device, verified_message.envelope, verified_message.entry
        if envelope is None:
            return
        if entry is not None:
            self._add_key(device, envelope.key, entry)
            if self._enrolled or entry.source != "first-use":  # otherwise its earlier status was accepted
                self._newcomers[device] = envelope.key
        self._store_number(type(verified_message.message), device, envelope, verified_message.known)

    def is_first(self, kind: type[Message], device: str, topic: str, payload: bytes) -> bool:
        """Return True if the device signed this message and it is newer than every accepted one of type ``kind``.

        False for a message that is invalid or unsigned. Does not accept it.
        """
        try:
            envelope = self.verify(kind, device, topic, payload).envelope
        except (IdentityError, ProtocolError):
            return False
        return envelope is not None and envelope.at > self._numbers.get((device, envelope.key, kind), 0)

    def is_listed(self, device: str) -> bool:
        """Return True if devices must be enrolled and this one has a key in the registry.

        False if devices need not be enrolled, because anybody can then invent the name.
        """
        return self._enrolled and bool(self._registry.keys(device))

    def is_barred(self, device: str) -> bool:
        """Return True if no message of the device can be accepted, because all of its keys were revoked or have expired.

        If devices must be enrolled, the result is also True for a device without a key.
        """
        keys, now = self._registry.keys(device), self._clock()
        is_valid = any(
            each.state == "active" or (each.state == "retired" and now < each.until) for each in keys
        )
        return not is_valid and (self._enrolled or bool(keys))

    def take_error(self) -> StoreError | None:
        """Return the error of the last failed write of the registry since the last call; None if there was none."""
        return self._registry.take_error()

    def take_status(self, device: str) -> Status | None:
        """Return the status of a device whose last hello introduced its key; None if the key was known before.

        A status that arrived before that hello was stored unverified, and is verified and accepted now. Without one
        the device is online. The result is given once.
        """
        key = self._newcomers.pop(device, None)
        if key is None:
            return None
        early = self._early.pop((device, key), None)
        if early is not None:
            with suppress(ProtocolError):  # it was stored unverified
                return self.open(Status, device, *early)
        return Status(online=True)

    def is_new(self, device: str, error: IdentityError) -> bool:
        """Return True at the first refusal of this device for the error's reason, so that it is reported only once.

        Only a bounded number is remembered, because an attacker may cause a million refusals.
        """
        key = device, error.reason
        if key in self._reported:
            return False
        self._reported[key] = None
        if len(self._reported) > _MAX_REPORTED:
            self._reported.popitem(last=False)
        return True

    def _keep_early(self, device: str, key: bytes, topic: str, payload: bytes) -> None:
        """Store a status message, unverified, until a hello introduces ``key``. The oldest one is dropped if there are
        too many.
        """
        self._early[device, key] = topic, payload
        self._early.move_to_end((device, key))
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)

    def _entry(
        self,
        device: str,
        topic: str,
        hello: Hello,
        envelope: Envelope,
        keys: Sequence[DeviceKey],
        max_devices: int,
    ) -> _KeyEntry:
        """Return the registry entry for a new key that a hello introduces.

        It is permitted by an enrolment token, by the device's earlier key, or as the first key of the name.

        Raises:
            IdentityError: If the key is not permitted, changes too quickly, or too many names are known.
        """
        if hello.token and self._is_proven(device, topic, hello, envelope):
            return _KeyEntry("token", token=hello.token)
        roots = {each.key: FOREVER for each in keys if each.state == "active"}
        if roots and envelope.key in (after := apply_successions(roots, envelope.succession)):
            self._check_pace(device, keys)
            return _KeyEntry("rotation", until=min(after[key] for key in roots))
        if self._enrolled or keys:
            raise unknown_key(device, envelope, keys)
        if self._registry.devices() >= max_devices:
            raise IdentityError(
                "too-many-devices",
                f"device {device} is refused: {max_devices} names are known already; forget some "
                "(`edgefl enroll forget`), raise limits.max_devices, or admit devices of a list only",
                device=device,
            )
        return _KeyEntry("first-use")

    def _is_proven(self, device: str, topic: str, hello: Hello, envelope: Envelope) -> bool:
        token = self._registry.token(hello.token, self._clock())
        return token is not None and token[0] == device and proves(token[1], topic, envelope.key, hello.proof)

    def _check_pace(self, device: str, keys: Sequence[DeviceKey]) -> None:
        [last] = [each for each in keys if each.state == "active"][-1:]
        if last.source == "rotation" and 0 <= self._clock() - last.added_at < _BETWEEN_ROTATIONS_S:
            raise IdentityError(
                "too-soon",
                f"key {short_key(last.key)} of {device} took another's place less than {_BETWEEN_ROTATIONS_S:g} s ago: "
                "connect again later",
                device=device,
            )

    def _add_key(self, device: str, key: bytes, entry: _KeyEntry) -> None:
        now = self._clock()
        try:
            self._registry.add(
                device, key, source=entry.source, now=now, until=entry.until, token=entry.token
            )
        except ConfigError as error:
            raise IdentityError("revoked-key", error.message, device=device) from error
        self._events.emit(Noted(text=_NOTICES[entry.source].format(device=device, key=key.hex())))

    def _is_copy(self, kind: type[Message], device: str, envelope: Envelope, known: DeviceKey | None) -> bool:
        """Return True if this process has accepted a message with the same number by this key before.

        The last message that an earlier process accepted is not a copy: it is retained, and its effect may be lost.

        Raises:
            IdentityError: If the message is older than the last accepted one.
        """
        number = self._numbers.get((device, envelope.key, kind), 0)
        if envelope.at < max(number, _stored_number(kind, known)):
            raise IdentityError(
                "replayed",
                f"a {kind.__name__} of {device} was said before another one that was heard already: somebody sends it again",
                device=device,
            )
        return known is not None and envelope.at == number

    def _store_number(
        self, kind: type[Message], device: str, envelope: Envelope, known: DeviceKey | None
    ) -> None:
        at = envelope.at
        # The registry's copy of the key: thousands of equal keys would take memory each.
        place = (device, envelope.key if known is None else known.key, kind)
        is_newer = at > max(self._numbers.get(place, 0), _stored_number(kind, known))
        self._numbers[place] = max(at, self._numbers.get(place, 0))
        self._numbers.move_to_end(place)
        if len(self._numbers) > _MAX_NUMBERS:
            self._numbers.popitem(last=False)
        if is_newer and kind in (Hello, Status):
            self._registry.store_numbers(
                device,
                envelope.key,
                hello_at=at if kind is Hello else 0,
                status_at=at if kind is Status else 0,
            )


def _stored_number(kind: type[Message], known: DeviceKey | None) -> int:
    """Return the number of the last accepted ``kind`` (hello or status) of this key in the registry; 0 if there is
    none.
    """
    return {Hello: known.hello_at, Status: known.status_at}.get(kind, 0) if known else 0


def check_valid(device: str, known: DeviceKey, now: float) -> None:
    """Raise IdentityError if the key was revoked, or if it was replaced and its remaining time is over.

    ``now`` is in epoch seconds.
    """
    if known.state == "revoked":
        raise IdentityError(
            "revoked-key",
            f"key {short_key(known.key)} of {device} was revoked: enroll the device again",
            device=device,
        )
    if known.state == "retired" and now >= known.until:
        raise IdentityError(
            "old-key",
            f"key {short_key(known.key)} of {device} was replaced, and is not good any more",
            device=device,
        )


def unsigned_error(kind: type[Message], device: str, *, enrolled: bool) -> IdentityError:
    """Return the error for a ``kind`` of message without a signature, where one is needed.

    ``enrolled`` is True if only enrolled devices may take part.
    """
    why = "only enrolled devices are let in" if enrolled else "this device signs what it says"
    return IdentityError("unsigned", f"a {kind.__name__} of {device} is not signed, and {why}", device=device)


def unknown_key(device: str, envelope: Envelope, keys: Sequence[DeviceKey]) -> IdentityError:
    """Return the error for a message of ``device`` that was signed by a key which is not among its ``keys``.

    Its reason is ``unknown-key`` if the device has no active key, else ``wrong-key``.
    """
    good = ", ".join(short_key(each.key) for each in keys if each.state == "active")
    if not good:
        text = f"device {device} with the key {envelope.key.hex()} is not enrolled: give it a token (`edgefl enroll token`)"
        return IdentityError("unknown-key", text, device=device)
    text = (
        f"device {device} is known by the key {good}, and this is signed by {envelope.key.hex()}: if its store was lost, "
        "forget the old key (`edgefl enroll forget`) or enroll it by a token; if not, somebody else uses its name"
    )
    return IdentityError("wrong-key", text, device=device)
