"""Where every message of a device comes in: whose it is, whether that key is good, and whether it is new.

Without enrolment the first key that says hello under a name is trusted from then on; with it only keys of the list are.
Nothing is stored of a message that is not let in.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic

from edgefl.errors import ConfigError, IdentityError, ProtocolError, StoreError
from edgefl.wire.enrolment import proves
from edgefl.wire.keys import FOREVER, known_after, shown
from edgefl.wire.mqtt.envelope import Envelope, unwrap, verified
from edgefl.wire.mqtt.messages import AnyMessage, Hello, Message, Status, UpdateChunk, decode
from edgefl_server.identity.ledger import Ledger
from edgefl_server.identity.registry import DeviceKey, Registry, Source

_MOST_TOLD = 1024
_MOST_EARLY = 1024
_MOST_HEARD = 100_000
_MOST_NAMES = 100_000
_WELCOMES: dict[Source, str] = {
    "token": "device {device} is enrolled by a token, with the key {key}",
    "rotation": "device {device} has a new key {key}, which its old one introduced",
    "first-use": "trust on first use: device {device} is who has the key {key} from now on",
}
_BETWEEN_ROTATIONS_S = 60.0
"""A device's key follows another at most that often: each is a row, and a write that waits for the disk."""


@dataclass(frozen=True)
class _Entry:
    """How a new key comes onto the list. ``until``: when the one before it ends."""

    source: Source
    until: int = 0
    token: str = ""


@dataclass(frozen=True)
class Visitor(Generic[AnyMessage]):
    """A message that may come in. Nothing is stored of it before it is admitted.

    ``again``: it was admitted before. Brokers send twice, and keep what is retained, and so may whoever can write there.
    """

    device: str
    message: AnyMessage
    envelope: Envelope | None = None
    known: DeviceKey | None = None
    entry: _Entry | None = None
    again: bool = False


class Door:
    """Opens the messages of one federation's devices.

    ``enrolled``: only keys of the registry are let in. ``note`` is told whose key is trusted from now on.
    """

    def __init__(
        self,
        registry: Registry,
        note: Callable[[str], None],
        *,
        enrolled: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = Ledger(registry, clock)
        self._note = note
        self._enrolled = enrolled
        self._clock = clock
        self._heard: OrderedDict[tuple[str, bytes, type[Message]], int] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._early: OrderedDict[tuple[str, bytes], tuple[str, bytes]] = OrderedDict()
        self._newcomers: dict[str, bytes] = {}

    def open(self, kind: type[AnyMessage], device: str, topic: str, payload: bytes) -> AnyMessage:
        """The device's message, checked and admitted."""
        visitor = self.check(kind, device, topic, payload)
        self.admit(visitor)
        return visitor.message

    def check(
        self,
        kind: type[AnyMessage],
        device: str,
        topic: str,
        payload: bytes,
        *,
        most_devices: int = _MOST_NAMES,
    ) -> Visitor[AnyMessage]:
        """The device's message, of which nothing is stored yet. IdentityError if it is not its own word, or old, or of one
        name more than ``most_devices``; ProtocolError if it is malformed."""
        envelope = unwrap(payload, kind)
        keys = self._ledger.keys(device)
        if envelope is None:
            self._check_bare(kind, device, keys)
            return Visitor(device, decode(kind, payload))
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and not issubclass(kind, Hello):
            if self._enrolled or keys:
                if issubclass(kind, Status):
                    self._keep_early(device, envelope.key, topic, payload)
                raise unknown_key(device, envelope, keys)
            # A name that never said hello has no say in anything: not even its number is kept.
            return Visitor(device, verified(kind, topic, envelope))
        if known is not None:
            check_good(device, known, self._clock())
        message = verified(kind, topic, envelope)
        entry = None
        if known is None and isinstance(message, Hello):
            entry = self._entry(device, topic, message, envelope, keys, most_devices)
        # Of chunks the task's nonce and the digest decide: pieces are sent again, in any order.
        again = not issubclass(kind, UpdateChunk) and self._is_copy(kind, device, envelope, known)
        return Visitor(device, message, envelope, known, entry, again)

    def admit(self, visitor: Visitor[AnyMessage]) -> None:
        """Store what has to be known of a message that was checked: a new key, and its number. Where a disk is full, that
        is kept for later: see :meth:`trouble`."""
        self._ledger.retry()
        if visitor.envelope is None:
            return
        if visitor.entry is not None:
            self._welcome(visitor.device, visitor.envelope.key, visitor.entry)
            if self._enrolled or visitor.entry.source != "first-use":  # else its status was let in
                self._newcomers[visitor.device] = visitor.envelope.key
        self._note_number(type(visitor.message), visitor.device, visitor.envelope, visitor.known)

    def is_first_sent(self, kind: type[Message], device: str, topic: str, payload: bytes) -> bool:
        """Return True if the device signed this, and nothing as new came of it yet: anybody may send a copy again."""
        try:
            visitor = self.check(kind, device, topic, payload)
        except (IdentityError, ProtocolError):
            return False
        envelope = visitor.envelope
        return envelope is not None and envelope.at > self._heard.get((device, envelope.key, kind), 0)

    def vouches_for(self, device: str) -> bool:
        """Whether the device is of a list: nobody can make its name up."""
        return self._enrolled and bool(self._ledger.keys(device))

    def shuts_out(self, device: str) -> bool:
        """Whether no key of the device is good, so that nothing that it may say is let in."""
        keys, now = self._ledger.keys(device), self._clock()
        good = any(each.state == "active" or (each.state == "retired" and now < each.until) for each in keys)
        return not good and (self._enrolled or bool(keys))

    def trouble(self) -> StoreError | None:
        """Why something could not be stored since this was last asked; None if all was."""
        return self._ledger.trouble()

    def presence(self, device: str) -> Status | None:
        """To be asked after a hello: whether the device is there, where that hello brought its key in. A status goes before
        the hello, and was refused under a key that was not known yet; without one it is there, as it speaks."""
        key = self._newcomers.pop(device, None)
        if key is None:
            return None
        early = self._early.pop((device, key), None)
        if early is not None:
            with suppress(ProtocolError):  # whoever can write can leave anything there
                return self.open(Status, device, *early)
        return Status(online=True)

    def is_news(self, device: str, error: IdentityError) -> bool:
        """Whether that is refused for the first time: whoever can send can send it a million times."""
        key = device, error.reason
        if key in self._told:
            return False
        self._told[key] = None
        if len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)
        return True

    def _keep_early(self, device: str, key: bytes, topic: str, payload: bytes) -> None:
        """A status whose hello may follow. Unverified: most come of keys that are never let in."""
        self._early[device, key] = topic, payload
        self._early.move_to_end((device, key))
        if len(self._early) > _MOST_EARLY:
            self._early.popitem(last=False)

    def _check_bare(self, kind: type[Message], device: str, keys: list[DeviceKey]) -> None:
        if self._enrolled or keys:
            raise unsigned(kind, device, enrolled=self._enrolled)

    def _entry(
        self,
        device: str,
        topic: str,
        hello: Hello,
        envelope: Envelope,
        keys: Sequence[DeviceKey],
        most_devices: int,
    ) -> _Entry:
        """How a new key comes onto the list: by a token, by the word of the key before it, or as the first of its name."""
        if hello.token and self._proven(device, topic, hello, envelope):
            return _Entry("token", token=hello.token)
        roots = {each.key: FOREVER for each in keys if each.state == "active"}
        if roots and envelope.key in (after := known_after(roots, envelope.succession)):
            self._check_pace(device, keys)
            return _Entry("rotation", until=min(after[key] for key in roots))
        if self._enrolled or keys:
            raise unknown_key(device, envelope, keys)
        if self._ledger.devices() >= most_devices:
            raise IdentityError(
                "too-many-devices",
                f"device {device} is not let in: {most_devices} names are known already; forget some "
                "(`edgefl enroll forget`), raise limits.max_devices, or let in devices of a list only",
                device=device,
            )
        return _Entry("first-use")

    def _proven(self, device: str, topic: str, hello: Hello, envelope: Envelope) -> bool:
        token = self._ledger.token(hello.token, self._clock())
        return token is not None and token[0] == device and proves(token[1], topic, envelope.key, hello.proof)

    def _check_pace(self, device: str, keys: Sequence[DeviceKey]) -> None:
        [last] = [each for each in keys if each.state == "active"][-1:]
        if last.source == "rotation" and 0 <= self._clock() - last.added_at < _BETWEEN_ROTATIONS_S:
            raise IdentityError(
                "too-soon",
                f"key {shown(last.key)} of {device} took another's place less than {_BETWEEN_ROTATIONS_S:g} s ago: "
                "connect again later",
                device=device,
            )

    def _welcome(self, device: str, key: bytes, entry: _Entry) -> None:
        now = self._clock()
        try:
            self._ledger.add(device, key, source=entry.source, now=now, until=entry.until, token=entry.token)
        except ConfigError as error:
            raise IdentityError("revoked-key", error.message, device=device) from error
        self._note(_WELCOMES[entry.source].format(device=device, key=key.hex()))

    def _is_copy(self, kind: type[Message], device: str, envelope: Envelope, known: DeviceKey | None) -> bool:
        """Whether this process heard the same already. IdentityError for what was said before something that was heard.

        What an earlier process heard last counts once more: it is retained, and its effect may be lost."""
        heard = self._heard.get((device, envelope.key, kind), 0)
        if envelope.at < max(heard, _stored(kind, known)):
            raise IdentityError(
                "replayed",
                f"a {kind.__name__} of {device} was said before another one that was heard already: somebody sends it again",
                device=device,
            )
        return known is not None and envelope.at == heard

    def _note_number(
        self, kind: type[Message], device: str, envelope: Envelope, known: DeviceKey | None
    ) -> None:
        at = envelope.at
        place = (
            device,
            envelope.key if known is None else known.key,
            kind,
        )  # equal: of thousands one copy is kept
        news = at > max(self._heard.get(place, 0), _stored(kind, known))
        self._heard[place] = max(at, self._heard.get(place, 0))
        self._heard.move_to_end(place)
        if len(self._heard) > _MOST_HEARD:
            self._heard.popitem(last=False)
        if news and kind in (Hello, Status):
            self._ledger.heard(
                device,
                envelope.key,
                hello_at=at if kind is Hello else 0,
                status_at=at if kind is Status else 0,
            )


def _stored(kind: type[Message], known: DeviceKey | None) -> int:
    """The number of the last message of a kind, as far as the list has it."""
    return {Hello: known.hello_at, Status: known.status_at}.get(kind, 0) if known else 0


def check_good(device: str, known: DeviceKey, now: float) -> None:
    """IdentityError for a key that is not good any more."""
    if known.state == "revoked":
        raise IdentityError(
            "revoked-key",
            f"key {shown(known.key)} of {device} was revoked: enroll the device again",
            device=device,
        )
    if known.state == "retired" and now >= known.until:
        raise IdentityError(
            "old-key",
            f"key {shown(known.key)} of {device} was replaced, and is not good any more",
            device=device,
        )


def unsigned(kind: type[Message], device: str, *, enrolled: bool) -> IdentityError:
    """What is wrong with a message that bears no signature."""
    why = "only enrolled devices are let in" if enrolled else "this device signs what it says"
    return IdentityError("unsigned", f"a {kind.__name__} of {device} is not signed, and {why}", device=device)


def unknown_key(device: str, envelope: Envelope, keys: Sequence[DeviceKey]) -> IdentityError:
    """What is wrong with a message that none of the device's ``keys`` signed."""
    good = ", ".join(shown(each.key) for each in keys if each.state == "active")
    if not good:
        text = f"device {device} with the key {envelope.key.hex()} is not enrolled: give it a token (`edgefl enroll token`)"
        return IdentityError("unknown-key", text, device=device)
    text = (
        f"device {device} is known by the key {good}, and this is signed by {envelope.key.hex()}: if its store was lost, "
        "forget the old key (`edgefl enroll forget`) or enroll it by a token; if not, somebody else uses its name"
    )
    return IdentityError("wrong-key", text, device=device)
