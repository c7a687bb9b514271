"""Faults in what an agent sends, and when."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from edgefl.wire.blobs import split
from edgefl.wire.mqtt.messages import Ack, Message, Status
from edgefl.wire.mqtt.session import Session
from edgefl_device import agent
from edgefl_device.agent import DeviceAgent
from edgefl_device.link.identity import SignedSession
from edgefl_device.link.outbox import Outbox
from edgefl_device.store.database import Outgoing, Store
from tests.conformance.wrong.update import changed


def believes_any_ack() -> None:
    """Take an answer to another update for one to its own."""

    def any_word(self: Outbox, nonce: str, sha256: str, patience_s: float) -> Ack | None:
        ack = self._acks.get(timeout=patience_s)
        return ack and msgspec.structs.replace(ack, nonce=nonce, sha256=sha256)

    Outbox._wait_for = any_word  # type: ignore[method-assign]


def forgets_its_store() -> None:
    """Begin each process with an empty store."""
    original_init = Store.__init__

    def fresh(self: Store, folder: Path, **options: Any) -> None:
        key = folder / "device.key"
        kept = key.read_bytes() if key.exists() else b""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if kept:
            key.write_bytes(kept)
        original_init(self, folder, **options)

    Store.__init__ = fresh  # type: ignore[method-assign]


def forgets_the_past() -> None:
    """Forget which tasks it has done."""
    Store.past = lambda self, nonce: None  # type: ignore[method-assign]


def goodbye_in_passing() -> None:
    """Say that it leaves to whoever listens just then: the broker keeps that it is online."""
    original_publish = SignedSession.publish

    def passing(
        self: SignedSession, topic: str, message: Message, *, qos: int = 1, retain: bool = False
    ) -> Any:
        leaving = isinstance(message, Status) and not message.online
        return original_publish(self, topic, message, qos=qos, retain=retain and not leaving)

    SignedSession.publish = passing  # type: ignore[method-assign]


def keeps_its_outbox() -> None:
    """Keep its update after the server's last word on it, and sends it on and on."""
    Store.settle = lambda self, past: None  # type: ignore[method-assign]


def no_goodbye() -> None:
    """Leave without a word, so that its will is said."""

    def gone(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    DeviceAgent._shut_down = gone  # type: ignore[method-assign]


def no_will() -> None:
    """Have no last will."""

    def without(*arguments: Any, **options: Any) -> Session:
        return Session(*arguments, **{**options, "will": None})

    agent.Session = without  # type: ignore[misc, assignment]


def replays_an_update() -> None:
    """Send its last update once more for each task that comes, though it was accepted."""
    original_settle, original_again = Outbox._send_until_settled, Outbox.send_again
    last: dict[int, Outgoing] = {}

    def settle(self: Outbox, outgoing: Outgoing) -> None:
        original_settle(self, outgoing)
        last[id(self)] = outgoing

    def again(self: Outbox) -> None:
        original_again(self)
        outgoing = last.get(id(self))
        if outgoing is not None:
            pieces = list(split(outgoing.data, self._limits.chunk_bytes - 512))
            self._send(outgoing, hashlib.sha256(outgoing.data).hexdigest(), pieces, range(len(pieces)))

    Outbox._send_until_settled = settle  # type: ignore[method-assign]
    Outbox.send_again = again  # type: ignore[method-assign]


def sends_all_again() -> None:
    """Send the whole update where a chunk is missing."""
    original_send = Outbox._send

    def whole(self: Outbox, outgoing: Outgoing, sha256: str, pieces: list[bytes], _: Iterable[int]) -> None:
        original_send(self, outgoing, sha256, pieces, range(len(pieces)))

    Outbox._send = whole  # type: ignore[method-assign]


def sends_once() -> None:
    """Send its update once, and waits for an answer that may be lost."""
    Outbox.send_again = lambda self: self.wake()  # type: ignore[method-assign]


def wrong_nonce() -> None:
    """Name another task in its update than in the chunks."""
    changed(lambda executor, update: {"nonce": "0" * 16})
