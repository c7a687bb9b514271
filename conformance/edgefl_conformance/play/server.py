"""Scripted server: it publishes the messages of a case, and answers nothing by itself."""

from __future__ import annotations

import queue
import secrets
import time
from pathlib import Path

import msgspec

from edgefl.errors import BrokerError
from edgefl.wire.blobs import BlobRef, compress, describe, split
from edgefl.wire.bundle.archive import signed_text
from edgefl.wire.keys import KeyPair
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.envelope import SIGNED, Envelope, MessageCounter, MessageSigner
from edgefl.wire.mqtt.envelope import signed_text as signed_message
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Ack, Message, Round, Task
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_conformance.play.messages import MessageLog

_START_S = 15.0
CHUNK_BYTES = Limits().chunk_bytes


def speaker_of(path: Path) -> MessageSigner:
    """Return a speaker with a key of its own, in a file, and numbers that begin with the clock."""
    return MessageSigner(KeyPair(path), MessageCounter())


class ScriptedServer:
    """Server of one federation with one device. ``speaker`` signs its messages unless a case replaces it."""

    def __init__(self, address: Address, federation: str, device: str, folder: Path) -> None:
        self._address = address
        self.topics = Topics(federation)
        self.mine = self.topics.device(device)
        self.speaker = speaker_of(folder / "signing.key")
        self.log = MessageLog(self.topics)
        self._session = Session(
            address,
            client_id(self.speaker.keys.client_secret, "server", federation),
            limits=Limits(),
            clean=True,
            events=self.log,
        )
        filters = (*self.topics.server_filters, self.topics.all_shards, *self.topics.profile_filters)
        self._session.subscribe(dict.fromkeys(filters))
        self._session.start()
        until = time.monotonic() + _START_S
        while not self._session.settled:
            if time.monotonic() > until:
                raise BrokerError(f"the broker at {address} does not answer; see broker.log")
            time.sleep(0.02)

    @property
    def key(self) -> str:
        """Public key, the agent's ``--server-key``."""
        return self.speaker.keys.public_key

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish bytes, and wait until the broker has them."""
        if not self._session.publish(topic, payload, retain=retain).wait(_START_S):
            raise BrokerError(f"the broker did not take a message on {topic} in {_START_S:g} s")

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """Return a correctly signed message, with the next number or ``at``."""
        return self.speaker.seal(topic, message, at)

    def seal_body(self, kind: type[Message], topic: str, body: bytes, *, v: int = SIGNED) -> bytes:
        """Return any bytes in an envelope, signed for ``topic`` as a ``kind``."""
        speaker = self.speaker
        at = speaker.numbers.next()
        text = signed_message(kind, topic, at, body)
        envelope = Envelope(v=v, key=speaker.keys.public, at=at, signature=speaker.keys.sign(text), body=body)
        return msgspec.msgpack.encode(envelope)

    def topic_of(self, message: Message) -> str:
        """Return the topic of a message."""
        if isinstance(message, Round):
            return self.topics.current_round
        return self.mine.tasks if isinstance(message, Task) else self.mine.acks

    def say(self, message: Round | Task | Ack, at: int | None = None) -> bytes:
        """Sign and publish a message, and return the payload. An announcement is retained."""
        topic = self.topic_of(message)
        payload = self.seal(topic, message, at)
        self.publish(topic, payload, retain=isinstance(message, Round))
        return payload

    def sign_bundle(self, ref: BlobRef) -> bytes:
        """Return the signature of a manifest."""
        return self.speaker.keys.sign(signed_text(ref.sha256))

    def put(self, data: bytes, chunk: int = CHUNK_BYTES, *, zstd: bool = False) -> BlobRef:
        """Publish a blob, retained, and return its reference."""
        ref, travels = compress(data, chunk) if zstd else (describe(data, chunk), data)
        self.put_chunks(ref, list(split(travels, chunk)))
        return ref

    def put_chunks(self, ref: BlobRef, pieces: list[bytes]) -> None:
        """Publish any pieces as the chunks of ``ref``."""
        for index, piece in enumerate(pieces):
            self.publish(self.topics.blob_chunk(ref.sha256, index), piece, retain=True)

    def retained(self, topic: str, within_s: float = 2.0) -> bytes | None:
        """Return the retained message of a topic, read by a new client; None if there is none."""
        name = f"edgefl:kit:{secrets.token_hex(6)}"
        session = Session(self._address, name, limits=Limits(), clean=True)
        session.subscribe([topic])
        session.start()
        try:
            deadline = time.monotonic() + within_s
            while True:
                event = session.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(event, IncomingMessage):
                    return event.payload if event.retained else None
        except queue.Empty:
            return None
        finally:
            session.stop(drain_s=0.5)

    def clear(self, topic: str) -> None:
        """Delete the retained message of a topic."""
        self.publish(topic, b"", retain=True)

    def stop(self) -> None:
        """Disconnect; retained messages end with the broker."""
        self._session.stop(drain_s=1.0)
