"""An agent among strangers, on a real broker: it acts on its server's word alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import signed_text
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import MessageSigner, open_message
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Ack, Decline, Hello, Message, Offer, ProfileRequest, Status, UpdateChunk
from edgefl_device.link.presence import NoticeLimiter
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import PATIENCE_S, wait_message
from tests.wire.mqtt.speakers import speaker_in

END = 2**31 - 1


class SigningServer(ScriptedServer):
    """The scripted server, with a key."""

    speaker: MessageSigner
    said: dict[str, bytes]
    """The last payload on each topic."""

    def say(self, topic: str, message: Message, *, retain: bool = False) -> bytes:
        payload = self.speaker.seal(topic, message)
        self.publish(topic, payload, retain=retain)
        self.said[topic] = payload
        return payload

    def announce(self, announcement: messages.Round) -> None:
        offers = {
            format: Offer(
                bundles=offer.bundles,
                signatures={tier: self._sign(ref) for tier, ref in offer.bundles.items()},
            )
            for format, offer in announcement.offers.items()
        }
        self.say(self.topics.current_round, msgspec.structs.replace(announcement, offers=offers), retain=True)

    def _sign(self, ref: BlobRef) -> bytes:
        return self.speaker.keys.sign(signed_text(ref.sha256))

    def assign(self, task: messages.Task) -> None:
        self.say(self.mine.tasks, task)

    def accept(self, update: messages.Update) -> None:
        digest = self.digests[update.nonce]
        self.say(
            self.mine.acks, Ack(round=update.round, nonce=update.nonce, status="accepted", sha256=digest)
        )


@pytest.fixture
def signing(server: ScriptedServer, tmp_path: Path) -> SigningServer:
    server.__class__ = SigningServer
    assert isinstance(server, SigningServer)
    server.speaker, server.said = speaker_in(tmp_path / "server.key"), {}
    server.session.subscribe([server.mine.profiles])
    return server


def test_a_forged_round_ends_nothing_and_drops_no_carry(
    signing: SigningServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    agent.agent.refusals = NoticeLimiter(0.0)  # each is told
    signing.open(world)
    update = signing.update()
    kept = len(agent.agent.store.carries())
    real, signing.speaker = signing.speaker, speaker_in(tmp_path / "stranger.key", 1 << 50)

    forged = world.announcement(number=END, base=0)
    signing.announce(forged)
    assert "this device knows" in agent.event("refused").text
    signing.publish(signing.topics.current_round, messages.encode(forged), retain=True)
    assert "is not signed" in agent.event("refused").text
    signing.accept(update)
    assert "this device knows" in agent.event("refused").text
    ack = Ack(
        round=1, nonce=update.nonce, status="rejected", reason="x", sha256=signing.digests[update.nonce]
    )
    signing.publish(signing.mine.acks, messages.encode(ack))
    assert "is not signed" in agent.event("refused").text

    assert agent.agent.store.waits(update.nonce)
    assert len(agent.agent.store.carries()) == kept
    signing.speaker = real
    signing.accept(update)
    assert agent.event("accepted").details["round"] == 1


def test_an_old_round_is_not_begun_again(signing: SigningServer, start: StartAgent, world: World) -> None:
    agent = start()
    signing.hello()
    signing.publish_blobs(world)
    old = signing.say(signing.topics.current_round, world.announcement(number=1), retain=True)
    signing.open(world, number=2)
    signing.accept(signing.update(2))
    agent.event("accepted")

    signing.publish(signing.topics.current_round, old, retain=True)

    assert "was said before" in agent.event("refused").text


def test_forged_messages_cost_a_line_each_now_and_then_and_no_answers(
    signing: SigningServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start(server_key=signing.speaker.keys.public.hex())
    signing.hello()
    forger, topic = speaker_in(tmp_path / "forger.key"), signing.mine.profile_requests
    asked = ProfileRequest(nonce="f" * 16, bundles={}, within_s=1.0)
    for _ in range(50):
        signing.publish(
            signing.topics.current_round, forger.seal(signing.topics.current_round, world.announcement())
        )
        signing.publish(topic, forger.seal(topic, asked))
    signing.say(topic, msgspec.structs.replace(asked, nonce="0" * 16, repeat=500))

    answers = [signing.profile_answer().nonce]
    while answers[-1] != "0" * 16:
        answers.append(signing.profile_answer().nonce)
    assert 2 <= len(answers) < 10
    limited = agent.event("limited")
    while limited.details["refused"] < 80:
        limited = agent.event("limited")
    agent.stop()
    told = [agent.events.get().event for _ in range(agent.events.qsize())]
    assert told.count("refused") < 20


def sent(signing: SigningServer) -> int:
    """How many pieces of updates came until the device had looked at all that it was sent: it answers to a request that
    is new to it."""
    asked = ProfileRequest(nonce="0" * 16, bundles={}, within_s=1.0, repeat=500)
    signing.say(signing.mine.profile_requests, asked)
    count = 0
    while True:
        event = signing.session.inbox.get(timeout=PATIENCE_S)
        if isinstance(event, IncomingMessage):
            if event.topic == signing.mine.profiles:
                return count
            count += "/updates/" in event.topic


def test_copies_of_what_the_server_said_last_cost_nothing(
    signing: SigningServer, start: StartAgent, world: World, limits: Limits
) -> None:
    agent = start(limits=msgspec.structs.replace(limits, ack_timeout_s=PATIENCE_S))
    signing.open(world)
    update = signing.update()
    digest = signing.digests[update.nonce]
    ack = Ack(round=1, nonce=update.nonce, status="missing", missing=[0], sha256=digest)
    signing.say(signing.mine.acks, ack)
    wait_message(signing.session, signing.mine.update(1, 0))

    for _ in range(5):
        for topic in (signing.topics.current_round, signing.mine.tasks, signing.mine.acks):
            signing.publish(topic, signing.said[topic])
    assert sent(signing) == 0
    assert agent.agent.outbox._acks.qsize() == 0

    signing.say(signing.mine.acks, ack)  # the server says it again by a number of its own
    wait_message(signing.session, signing.mine.update(1, 0))
    signing.accept(update)
    assert agent.event("accepted").details["round"] == 1


def test_a_copied_request_is_answered_once(signing: SigningServer, start: StartAgent) -> None:
    agent = start(server_key=signing.speaker.keys.public.hex())
    signing.hello()
    asked = ProfileRequest(nonce="0" * 16, bundles={}, within_s=1.0, repeat=500)
    payload = signing.say(signing.mine.profile_requests, asked)
    assert signing.profile_answer().nonce == asked.nonce

    for _ in range(5):
        signing.publish(signing.mine.profile_requests, payload)
    signing.say(signing.mine.profile_requests, msgspec.structs.replace(asked, nonce="1" * 16))

    assert signing.profile_answer().nonce == "1" * 16
    agent.stop()
    start(server_key=signing.speaker.keys.public.hex())
    signing.hello()
    signing.publish(signing.mine.profile_requests, signing.said[signing.mine.profile_requests])
    signing.say(signing.mine.profile_requests, asked)
    assert signing.profile_answer().nonce == asked.nonce


@pytest.mark.parametrize("what", ["update", "decline"])
def test_lost_words_are_said_again_after_a_reconnect(
    signing: SigningServer, start: StartAgent, world: World, limits: Limits, what: str
) -> None:
    agent = start(limits=msgspec.structs.replace(limits, ack_timeout_s=PATIENCE_S))
    signing.hello()
    announcement = world.announcement()
    if what == "decline":
        offers = {"executorch": Offer(bundles={"weak": world.bundle_ref})}
        announcement = msgspec.structs.replace(announcement, offers=offers)
    signing.publish_blobs(world)
    signing.announce(announcement)
    signing.assign(world.task())
    topic = signing.mine.declines if what == "decline" else signing.mine.update(1, 0)
    first = wait_message(signing.session, topic)

    sock = agent.agent.session._client.socket()
    assert sock is not None
    sock.shutdown(2)

    while wait_message(signing.session, topic) == first:  # the same packet may come once more
        pass


def test_an_executable_bundle_of_an_unsigned_server_is_not_loaded(
    server: ScriptedServer, start: StartAgent, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start()
    server.hello()
    monkeypatch.setattr(agent.agent.engine, "format", "executorch")
    server.publish_blobs(world)
    offers = {"executorch": Offer(bundles={"weak": world.bundle_ref}, signatures={"weak": bytes(64)})}
    server.announce(msgspec.structs.replace(world.announcement(), offers=offers))
    server.assign(world.task())

    assert "knows no key of a server: it is not loaded" in agent.event("failed").text


def test_what_a_device_says_is_signed_by_the_key_in_its_store(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    start()
    status = open_message(Status, server.mine.status, wait_message(server.session, server.mine.status))
    hello = open_message(Hello, server.mine.hello, wait_message(server.session, server.mine.hello))
    server._greeted = True
    server.open(world)
    topic = server.mine.update(1, 0)
    chunk = open_message(UpdateChunk, topic, wait_message(server.session, topic))

    own = speaker_in(tmp_path / "state" / "device.key").keys.public
    assert status.key == hello.key == chunk.key == own


def test_a_decline_is_signed(signing: SigningServer, start: StartAgent, world: World) -> None:
    start()
    signing.hello()
    offers = {"executorch": Offer(bundles={"weak": world.bundle_ref})}
    signing.announce(msgspec.structs.replace(world.announcement(), offers=offers))
    signing.assign(world.task())

    payload = wait_message(signing.session, signing.mine.declines)
    assert open_message(Decline, signing.mine.declines, payload).key
