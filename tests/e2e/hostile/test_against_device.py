"""The attack matrix's rows against a device that was given its server's key, over TLS: the real round is trained and
accepted, once, and nothing else is begun, dropped or sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.envelope import unsigned
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Ack, Message, Offer, ProfileRequest
from edgefl.wire.mqtt.session import Session
from edgefl_device.link.presence import NoticeLimiter
from tests.conftest import SessionFactory
from tests.device_runtime import tiny
from tests.device_runtime.agent.scripted import DEVICE, RunningAgent
from tests.device_runtime.agent.test_signed import SigningServer
from tests.device_runtime.tiny import World
from tests.e2e.hostile.stage import EVERYTHING, FEDERATION, TOPICS, changed, secured
from tests.wire.mqtt.events import wait_up
from tests.wire.mqtt.speakers import speaker_in

MINE = TOPICS.device(DEVICE)


@dataclass
class Scene:
    """A device and its server, and ``attacker``, who has the server's credentials at the broker and not its key: to a
    device the broker itself can say no more."""

    agent: RunningAgent
    server: SigningServer
    attacker: Session
    world: World
    folder: Path

    def forged(self, topic: str, message: Message, *, retain: bool = False) -> None:
        """Signed by a key that the device does not know."""
        payload = speaker_in(self.folder / "forger.key", 1 << 50).seal(topic, message)
        assert self.attacker.publish(topic, payload, retain=retain).wait(60.0)

    def refused(self, words: str) -> None:
        while words not in self.agent.event("refused").text:
            pass

    def goes_on(self, number: int = 1) -> None:
        """The server's own round is trained and accepted."""
        self.server.open(self.world, number=number)
        self.server.accept(self.server.update(number))
        assert self.agent.event("accepted").details["round"] == number

    def sent(self) -> list[IncomingMessage]:
        """Pieces of updates that came to the server and were not looked at yet."""
        mark = b"mark of this look"
        self.server.publish(TOPICS.device("mark").hello, mark)
        found = []
        while (event := self.server.session.inbox.get(timeout=60.0)) != IncomingMessage(
            TOPICS.device("mark").hello, mark
        ):
            if isinstance(event, IncomingMessage) and "/updates/" in event.topic:
                found.append(event)
        return found


@pytest.fixture
def scene(tmp_path: Path, limits: Limits, connect: SessionFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        broker = stack.enter_context(secured(tmp_path / "broker", DEVICE))
        speaker = speaker_in(tmp_path / "server.key")
        server = SigningServer(connect(broker.user(EVERYTHING)), FEDERATION)
        server.speaker, server.said = speaker, {}
        agent = RunningAgent(
            FEDERATION, broker.user(DEVICE), tmp_path, limits, server_key=speaker.keys.public.hex()
        )
        agent.agent.refusals = NoticeLimiter(0.0)  # each is told, where few are
        stack.callback(agent.stop)
        attacker = connect(broker.user("server"))
        wait_up(attacker)
        yield Scene(agent, server, attacker, World(tiny.make_bundle()), tmp_path)


def test_a_server_without_its_key_begins_nothing(scene: Scene, tmp_path: Path) -> None:
    """write, poison: rounds, tasks, acknowledgements and requests for profiles, bare and of another key; a genuine bundle
    under other numbers."""
    scene.goes_on(1)
    store = scene.agent.agent.store
    carried = len(store.carries())
    later = scene.world.announcement(number=2**31 - 1, base=0)
    poisoned = msgspec.structs.replace(scene.world.announcement(number=2), hyper={"lr": 1e9})
    for each in (later, poisoned):
        scene.forged(TOPICS.current_round, each, retain=True)
        scene.refused("this device knows")
        assert scene.attacker.publish(TOPICS.current_round, unsigned("", each), retain=True).wait(60.0)
        scene.refused("is not signed")
    scene.forged(MINE.tasks, scene.world.task(number=2))
    scene.refused("this device knows")
    scene.forged(MINE.acks, Ack(round=1, nonce="0" * 24, status="accepted", sha256="0" * 64))
    scene.refused("this device knows")
    request = ProfileRequest(
        nonce="0" * 16, bundles={"onnx": scene.world.bundle_ref}, within_s=60.0, repeat=1, signatures={}
    )
    asked = speaker_in(tmp_path / "forger.key").seal(MINE.profile_requests, request)
    scene.server.publish(MINE.profile_requests, asked)  # an asker has no key, either
    scene.refused("this device knows")

    assert len(store.carries()) == carried and not scene.sent()
    scene.goes_on(2)


def test_a_forged_acceptance_drops_no_update(scene: Scene) -> None:
    """write: the update waits for the word of its own server."""
    scene.server.open(scene.world)
    update = scene.server.update()
    digest = scene.server.digests[update.nonce]
    for status in ("accepted", "rejected"):
        scene.forged(MINE.acks, Ack(round=1, nonce=update.nonce, status=status, sha256=digest))  # type: ignore[arg-type]
        scene.refused("this device knows")
    assert scene.agent.agent.store.waits(update.nonce)
    scene.server.accept(update)
    assert scene.agent.event("accepted").details["round"] == 1


def test_what_the_server_said_once_is_not_done_again(scene: Scene) -> None:
    """read, replay: an old announcement and task bring the device to train, and to send, nothing."""
    scene.goes_on(1)
    announced, assigned = scene.server.said[TOPICS.current_round], scene.server.said[MINE.tasks]
    scene.goes_on(2)

    for topic, payload in ((TOPICS.current_round, announced), (MINE.tasks, assigned)):
        assert scene.attacker.publish(topic, payload, retain=topic == TOPICS.current_round).wait(60.0)
    scene.refused("was said before")
    assert scene.attacker.publish(TOPICS.current_round, changed(announced), retain=True).wait(60.0)
    scene.refused("does not hold")

    assert not scene.sent()
    scene.goes_on(3)


def test_a_device_that_is_flooded_trains_on(scene: Scene) -> None:
    """flood, crash: rubbish on each topic that it reads, more than it can look at."""
    scene.agent.agent.refusals = NoticeLimiter(scene.agent.agent.config.limits.notice_s)
    rng = np.random.default_rng(0)
    topics = (TOPICS.current_round, MINE.tasks, MINE.acks)
    forged = speaker_in(scene.folder / "forger.key").seal(TOPICS.current_round, scene.world.announcement())
    for number in range(1500):
        payload = (rng.bytes(200), forged, b"\xdf\xff\xff\xff\xff", b"")[number % 4]
        scene.attacker.publish(topics[number % 3], payload, qos=0)
    for topic in topics:
        assert scene.attacker.publish(topic, rng.bytes(100)).wait(60.0)
    scene.goes_on(1)
    assert scene.agent.alive
    scene.agent.stop()
    told = [scene.agent.events.get() for _ in range(scene.agent.events.qsize())]
    assert len(told) < 200, "a flood fills no log"


def test_bytes_that_are_not_what_was_announced_are_not_loaded(scene: Scene) -> None:
    """write, poison: the chunks of weights and graphs are replaced where they lie."""
    scene.server.hello()
    scene.server.publish_blobs(scene.world)
    announcement = scene.world.announcement()
    refs = [scene.world.bundle_ref, *(ref for refs in announcement.units.values() for ref in refs)]
    for ref in refs:
        topic = TOPICS.blob_chunk(ref.sha256, 0)
        assert scene.attacker.publish(topic, bytes(ref.chunk), retain=True).wait(60.0)
    scene.server.announce(announcement)
    scene.server.assign(scene.world.task())
    assert scene.agent.event("failed", "accepted").event == "failed"
    assert not scene.sent()
    scene.server.publish_blobs(scene.world)
    scene.server.accept(scene.server.update())
    assert scene.agent.event("accepted").details["round"] == 1


def test_an_unsigned_executable_is_not_loaded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """crash: loading a `.pte` is as good as running it; this one is announced by whoever has no key."""
    scene.server.hello()
    monkeypatch.setattr(scene.agent.agent.engine, "format", "executorch")
    scene.server.publish_blobs(scene.world)
    offers = {"executorch": Offer(bundles={"weak": scene.world.bundle_ref}, signatures={"weak": bytes(64)})}
    announcement = msgspec.structs.replace(scene.world.announcement(), offers=offers)
    scene.server.say(TOPICS.current_round, announcement, retain=True)
    scene.server.assign(scene.world.task())
    assert "signature" in scene.agent.event("failed", "declined").text
