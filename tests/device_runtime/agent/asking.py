"""The other end of a request for a profile, and a measurement that follows a script."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edgefl.errors import RoundAborted
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import BundleArchive, read_bundle
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import Seal, peek, unsigned
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import ProfileAnswer, ProfileOffer, ProfileRequest
from edgefl.wire.mqtt.topics import ProfileTopics
from tests.device_runtime import tiny
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.wire.bundle.example_profile import example_profile
from tests.wire.mqtt.events import wait_for

NONCE = "00112233aabbccdd"


@dataclass
class Scripted:
    """A measurement that waits for the test; what it was asked is in ``files`` and ``repeats``."""

    files: list[BundleArchive] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    fails: Exception | None = None

    def measure(self, bundle: Path, repeat: int, cancelled: threading.Event, until: float) -> BundleProfile:
        self.files.append(read_bundle(bundle))
        self.repeats.append(repeat)
        while not self.go.wait(0.005):
            if cancelled.is_set():
                raise RoundAborted("told to stop")
        if self.fails is not None:
            raise self.fails
        return example_profile(self.files[-1].ref(1 << 17).sha256)


class Asker:
    """The other end: publishes bundles for one request, sends it, reads answers."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.seal: Seal = unsigned
        self.topics = ProfileTopics(server.topics.federation, NONCE)
        server.session.subscribe(self.server.topics.profile_filters[2:3])

    def publish(self, bundle: BundleArchive) -> BlobRef:
        for data in bundle.blobs.values():
            publish_blob(self.server.session, self.topics, data, tiny.CHUNK)
        return publish_blob(self.server.session, self.topics, bundle.encoded, tiny.CHUNK)

    def offer(self) -> None:
        """Say, as askers do before they ask, that somebody waits."""
        offer = ProfileOffer(until=0.0, blobs=())
        self.server.publish(self.topics.offer, messages.encode(offer), retain=True)

    def leave(self) -> None:
        self.server.publish(self.topics.offer, b"", retain=True)

    def ask(self, ref: BlobRef, kind: str = "onnx", **changes: object) -> None:
        self.offer()
        self.send(ref, kind, **changes)

    def send(self, ref: BlobRef, kind: str = "onnx", **changes: object) -> None:
        request = ProfileRequest(nonce=NONCE, bundles={kind: ref}, within_s=60.0, repeat=3)
        asked = msgspec.structs.replace(request, **changes)
        topic = self.server.mine.profile_requests
        self.server.publish(topic, self.seal(topic, asked))

    def answer(self) -> ProfileAnswer:
        event = wait_for(
            self.server.session, IncomingMessage, lambda event: event.topic == self.server.mine.profiles
        )
        return peek(ProfileAnswer, event.payload)

    def last_word(self) -> ProfileAnswer:
        while (answer := self.answer()).state == "taken":
            pass
        return answer
