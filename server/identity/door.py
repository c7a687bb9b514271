"""Where every message of a device comes in: whose it is, whether that key is good, and whether it is new.

Without enrolment the first key that says hello under a name is trusted from then on; with it only keys of the list are.
Nothing is stored of a message that is not let in.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from edgefl.wire.enrolment import proves
from edgefl.wire.errors import ConfigError, IdentityError, ProtocolError
from edgefl.wire.keys import FOREVER, known_after, shown
from edgefl.wire.mqtt.envelope import Envelope, unwrap, verified
from edgefl.wire.mqtt.messages import AnyMessage, Hello, Message, Status, UpdateChunk, decode
from server.identity.registry import DeviceKey, Registry

_MOST_TOLD = 1024
_MOST_EARLY = 1024
_MOST_HEARD = 100_000


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
        self._registry = registry
        self._note = note
        self._enrolled = enrolled
        self._clock = clock
        self._heard: OrderedDict[tuple[str, bytes, type[Message]], int] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._early: OrderedDict[tuple[str, bytes], tuple[str, bytes]] = OrderedDict()
        self._newcomers: dict[str, bytes] = {}

    def open(self, kind: type[AnyMessage], device: str, topic: str, payload: bytes) -> AnyMessage:
        """The device's message. IdentityError if it is not its own word, or old; ProtocolError if it is malformed."""
        envelope = unwrap(payload, kind)
        keys = self._registry.keys(device)
        if envelope is None:
            self._check_bare(kind, device, keys)
            return decode(kind, payload)
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and not issubclass(kind, Hello):
            if self._enrolled or keys:
                if issubclass(kind, Status):
                    self._keep_early(device, envelope.key, topic, payload)
                raise _unknown(device, envelope, keys)
            return verified(kind, topic, envelope)  # a name that never said hello has no say in anything
        if known is not None:
            self._check_good(device, known)
        message = verified(kind, topic, envelope)
        if known is None and isinstance(message, Hello):
            self._welcome(device, topic, message, envelope, keys)
            if self._enrolled or keys:  # else its status was let in
                self._newcomers[device] = envelope.key
        if not issubclass(kind, UpdateChunk):  # of these the task's nonce and the digest decide
            self._in_order(kind, device, envelope, known)
        return message

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
            why = "only enrolled devices are let in" if self._enrolled else "this device signs what it says"
            raise IdentityError(
                "unsigned", f"a {kind.__name__} of {device} is not signed, and {why}", device=device
            )

    def _check_good(self, device: str, known: DeviceKey) -> None:
        if known.state == "revoked":
            raise IdentityError(
                "revoked-key",
                f"key {shown(known.key)} of {device} was revoked: enroll the device again",
                device=device,
            )
        if known.state == "retired" and self._clock() >= known.until:
            raise IdentityError(
                "old-key",
                f"key {shown(known.key)} of {device} was replaced, and is not good any more",
                device=device,
            )

    def _welcome(
        self, device: str, topic: str, hello: Hello, envelope: Envelope, keys: list[DeviceKey]
    ) -> None:
        """Take a new key onto the list, by a token, by the word of the key before it, or as the first of its name."""
        now = self._clock()
        if hello.token and self._redeemed(device, topic, hello, envelope, now):
            self._note(f"device {device} is enrolled by a token, with the key {envelope.key.hex()}")
            return
        roots = {each.key: FOREVER for each in keys if each.state == "active"}
        if roots and envelope.key in (after := known_after(roots, envelope.succession)):
            until = min(after[key] for key in roots)
            self._registry.add(device, envelope.key, source="rotation", now=now, until=until)
            self._note(f"device {device} has a new key {envelope.key.hex()}, which its old one introduced")
            return
        if self._enrolled or keys:
            raise _unknown(device, envelope, keys)
        self._registry.add(device, envelope.key, source="first-use", now=now)
        self._note(f"trust on first use: device {device} is who has the key {envelope.key.hex()} from now on")

    def _redeemed(self, device: str, topic: str, hello: Hello, envelope: Envelope, now: float) -> bool:
        token = self._registry.token(hello.token, now)
        if token is None or token[0] != device or not proves(token[1], topic, envelope.key, hello.proof):
            return False
        try:
            self._registry.redeem(hello.token, device, envelope.key, now=now)
        except ConfigError as error:
            raise IdentityError("revoked-key", error.message, device=device) from error
        return True

    def _in_order(
        self, kind: type[Message], device: str, envelope: Envelope, known: DeviceKey | None
    ) -> None:
        """IdentityError for what was said before something that was heard already. The same once more is no harm: brokers
        send twice, and keep what is retained."""
        stored = {Hello: known.hello_at, Status: known.status_at} if known else {Hello: 0, Status: 0}
        at, place = envelope.at, (device, envelope.key, kind)
        last = max(self._heard.get(place, 0), stored.get(kind, 0))
        if at < last:
            raise IdentityError(
                "replayed",
                f"a {kind.__name__} of {device} was said before another one that was heard already: somebody sends it again",
                device=device,
            )
        self._heard[place] = at
        self._heard.move_to_end(place)
        if len(self._heard) > _MOST_HEARD:
            self._heard.popitem(last=False)
        if at > last and kind in stored:
            self._registry.heard(
                device,
                envelope.key,
                hello_at=at if kind is Hello else 0,
                status_at=at if kind is Status else 0,
            )


def _unknown(device: str, envelope: Envelope, keys: list[DeviceKey]) -> IdentityError:
    good = ", ".join(shown(each.key) for each in keys if each.state == "active")
    if not good:
        text = f"device {device} with the key {envelope.key.hex()} is not enrolled: give it a token (`edgefl enroll token`)"
        return IdentityError("unknown-key", text, device=device)
    text = (
        f"device {device} is known by the key {good}, and this is signed by {envelope.key.hex()}: if its store was lost, "
        "forget the old key (`edgefl enroll forget`) or enroll it by a token; if not, somebody else uses its name"
    )
    return IdentityError("wrong-key", text, device=device)
