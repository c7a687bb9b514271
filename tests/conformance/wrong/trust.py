"""Faults in whom an agent believes: signatures, keys, order and bundles."""

from __future__ import annotations

import os
import time

import msgspec

from edgefl.errors import IdentityError
from edgefl.wire import keys
from edgefl.wire.mqtt.envelope import Envelope, MessageSigner
from edgefl.wire.mqtt.messages import AnyMessage, Hello, Message, decode, encode
from edgefl_device.link import identity
from edgefl_device.link.identity import ServerTrust
from edgefl_device.round.control import RoundControl, StepProgress
from edgefl_device.store.database import Store


def drops_the_old_key() -> None:
    """Hear a key no more once it introduced the next, though it has time left."""
    known_after = keys.apply_successions

    def newest(known: dict[bytes, int], said: tuple[keys.Succession, ...]) -> dict[bytes, int]:
        return {key: until for key, until in known_after(known, said).items() if until == keys.FOREVER}

    keys.apply_successions = newest  # type: ignore[assignment]


def ends_at_the_past() -> None:
    """End where the server's message is older than its last one."""
    original_in_order = ServerTrust._check_order

    def or_end(self: ServerTrust, kind: type[Message], topic: str, envelope: Envelope) -> None:
        try:
            original_in_order(self, kind, topic, envelope)
        except IdentityError as error:
            if error.reason == "replayed":
                os._exit(70)
            raise

    ServerTrust._check_order = or_end  # type: ignore[method-assign]


def forgets_key() -> None:
    """Forget at a restart whom it follows."""
    original_fact = Store.fact

    def fact(self: Store, name: str) -> bytes | None:
        return None if name == "server-keys" else original_fact(self, name)

    Store.fact = fact  # type: ignore[method-assign]


def forgets_numbers() -> None:
    """Forget at a restart how far the numbers of the server were."""
    original_fact = Store.fact

    def fact(self: Store, name: str) -> bytes | None:
        return None if name == "server-numbers" else original_fact(self, name)

    Store.fact = fact  # type: ignore[method-assign]


def forgets_successions() -> None:
    """Know after a restart the key that it was given, and not the one that this introduced."""
    original_fact = Store.fact

    def fact(self: Store, name: str) -> bytes | None:
        kept = original_fact(self, name)
        if kept is None or name != "server-keys":
            return kept
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(kept), "statements": []})

    Store.fact = fact  # type: ignore[method-assign]


def hears_bare_messages() -> None:
    """Act on messages that nobody signed, though it knows the key of the server."""

    def taken(self: ServerTrust, kind: type[AnyMessage], _topic: str, payload: bytes) -> AnyMessage:
        return decode(kind, payload)

    ServerTrust._open_unsigned = taken  # type: ignore[method-assign, assignment]


def hears_bare_messages_slowly() -> None:
    """Act on messages that nobody signed, and trains for so long that it drops them for the next task."""
    slow_s = 1.5
    original_report = RoundControl.report
    hears_bare_messages()

    def slowly(self: RoundControl, step: StepProgress) -> None:
        time.sleep(slow_s if step.stage == "train" else 0.0)
        original_report(self, step)

    RoundControl.report = slowly  # type: ignore[method-assign]


def hears_strangers() -> None:
    """Act on what any key signed."""

    def anybody(self: ServerTrust, _kind: type[Message], _envelope: Envelope) -> None:
        return None

    ServerTrust._admit = anybody  # type: ignore[method-assign, assignment]


def hears_the_past() -> None:
    """Act on what the server said before something else."""
    ServerTrust._check_order = lambda *_: None  # type: ignore[method-assign, assignment]


def ignores_expiry() -> None:
    """Hear a key for ever, though its time is over."""
    known_after = keys.apply_successions
    keys.apply_successions = lambda known, said: dict.fromkeys(known_after(known, said), keys.FOREVER)


def ignores_signatures() -> None:
    """Look at who is said to have signed, and at no signature."""

    def believed(kind: type[AnyMessage], _topic: str, envelope: Envelope) -> AnyMessage:
        return decode(kind, envelope.body)

    identity.verify_envelope = believed


def loads_unsigned_bundles() -> None:
    """Load whatever bundle it is offered."""
    ServerTrust.check_bundle = lambda *_: None  # type: ignore[method-assign, assignment]


def unsigned_hello() -> None:
    """Say hello without a signature."""
    original_seal = MessageSigner.seal

    def seal(self: MessageSigner, topic: str, message: Message, at: int | None = None) -> bytes:
        return encode(message) if isinstance(message, Hello) else original_seal(self, topic, message, at)

    MessageSigner.seal = seal  # type: ignore[method-assign]
