"""Cases of signatures: an agent acts on messages of known keys only."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from edgefl.wire.keys import KeyPair, Succession, rotate
from edgefl.wire.mqtt.envelope import Envelope, MessageSigner
from edgefl.wire.mqtt.messages import Ack, Round, Task, encode
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import Play, RoundHarness
from edgefl_conformance.play.server import speaker_of

TRUST = CaseGroup("trust")


@TRUST.case("Does nothing for a bare Task, as it knows the server's key.")
def bare_task(harness: RoundHarness) -> None:
    _task_is_ignored(harness, encode)


@TRUST.case("Does nothing for a bare Round, as it knows the server's key.")
def bare_round(harness: RoundHarness) -> None:
    _round_is_ignored(harness, encode)


@TRUST.case("Does not drop its update for a bare Ack: it sends it again.")
def bare_ack(harness: RoundHarness) -> None:
    _ack_is_ignored(harness, encode)


@TRUST.case("Does nothing for a Task that another key signed.")
def task_of_a_stranger(harness: RoundHarness) -> None:
    stranger = _stranger(harness)
    _task_is_ignored(harness, lambda task: stranger.seal(harness.server.mine.tasks, task))


@TRUST.case("Does nothing for a Round that another key signed, and continues with the server's own.")
def round_of_a_stranger(harness: RoundHarness) -> None:
    stranger = _stranger(harness)
    _round_is_ignored(
        harness, lambda announced: stranger.seal(harness.server.topics.current_round, announced)
    )


@TRUST.case("Does not drop its update for an Ack that another key signed: it sends it again.")
def ack_of_a_stranger(harness: RoundHarness) -> None:
    stranger = _stranger(harness)
    _ack_is_ignored(harness, lambda ack: stranger.seal(harness.server.mine.acks, ack))


@TRUST.case("Does nothing for a Task whose signature does not hold.")
def wrong_signature(harness: RoundHarness) -> None:
    def spoilt(task: Task) -> bytes:
        whole = msgspec.msgpack.decode(harness.server.seal(harness.server.mine.tasks, task), type=Envelope)
        other = encode(msgspec.structs.replace(task, seed=task.seed + 1))
        return msgspec.msgpack.encode(msgspec.structs.replace(whole, body=other))

    _task_is_ignored(harness, spoilt)


@TRUST.case(
    "Does nothing for a Task that was signed for another device's topic, or as another kind of message."
)
def wrong_place(harness: RoundHarness) -> None:
    elsewhere = harness.server.topics.device("agent-2").tasks
    _task_is_ignored(harness, lambda task: harness.server.seal(elsewhere, task))
    topic = harness.server.mine.tasks
    _task_is_ignored(harness, lambda task: harness.server.seal_body(Ack, topic, encode(task)))


@TRUST.case("Loads no ExecuTorch bundle without a signature of a key that it knows.", engines=("executorch",))
def unsigned_bundle(harness: RoundHarness) -> None:
    _bundle_is_refused(harness, b"")


@TRUST.case("Loads no ExecuTorch bundle that another key signed.", engines=("executorch",))
def bundle_of_a_stranger(harness: RoundHarness) -> None:
    stranger = _stranger(harness)
    ref = harness.offer(harness.material())[0].bundles[harness.material().manifest.tier]
    _bundle_is_refused(harness, stranger.keys.sign(f"edgefl/v1/bundle/{ref.sha256}".encode()))


@TRUST.case(
    "Without a key, trusts the first that signs a Round, and remembers it over a restart.", alone=True
)
def trust_on_first_use(harness: RoundHarness) -> None:
    harness.start(known=False)
    harness.good_round()
    stranger = _stranger(harness)
    _task_is_ignored(harness, lambda task: stranger.seal(harness.server.mine.tasks, task))
    what, announced = harness.prepare()
    harness.restart_before(stranger.seal(harness.server.topics.current_round, announced))
    mark = harness.server.log.mark()
    task = harness.task(announced, what)
    harness.server.publish(harness.server.mine.tasks, stranger.seal(harness.server.mine.tasks, task))
    harness.quiet(mark, "no update for somebody who was there first after a restart")
    harness.good_round()


@TRUST.case(
    "Follows a key that the known one introduces (succession), hears the old one's tasks, and remembers it.",
    alone=True,
)
def succession(harness: RoundHarness) -> None:
    harness.start()
    harness.good_round()
    old, new = harness.server.speaker, _rotated(harness, overlap_s=3600.0)
    harness.server.speaker = new
    harness.good_round()
    _task_is_heard(harness, old)
    _round_is_ignored(harness, lambda announced: old.seal(harness.server.topics.current_round, announced))
    harness.server.speaker = MessageSigner(_without_chain(new.keys), new.numbers)
    over = msgspec.structs.replace(harness.announcement(*harness.offer(harness.material())), state="closed")
    harness.restart_before(harness.server.seal(harness.server.topics.current_round, over))
    harness.good_round()


@TRUST.case("Does nothing for the tasks of a key whose time is over (succession, `until`).", alone=True)
def expired_key(harness: RoundHarness) -> None:
    harness.start()
    harness.good_round()
    old, new = harness.server.speaker, _rotated(harness, overlap_s=-60.0)
    harness.server.speaker = new
    harness.good_round()
    _task_is_ignored(harness, lambda task: old.seal(harness.server.mine.tasks, task))


@TRUST.case("Follows no key that somebody else introduces.", alone=True)
def forged_succession(harness: RoundHarness) -> None:
    harness.start()
    harness.good_round()
    stranger = _stranger(harness)
    text = f"edgefl/succession/1\n{harness.server.key}\n{stranger.keys.public_key}\n{1 << 40}\n".encode()
    statement = Succession(
        old=bytes.fromhex(harness.server.key),
        new=stranger.keys.public,
        until=1 << 40,
        signature=stranger.keys.sign(text),
    )

    def forged(announced: Round) -> bytes:
        whole = msgspec.msgpack.decode(
            stranger.seal(harness.server.topics.current_round, announced), type=Envelope
        )
        return msgspec.msgpack.encode(msgspec.structs.replace(whole, succession=(statement,)))

    _round_is_ignored(harness, forged)


def _task_is_heard(harness: RoundHarness, speaker: MessageSigner) -> None:
    """Expect an update for a task that ``speaker`` signed, in a round of the server."""
    what, announced = harness.prepare()
    task = harness.task(announced, what, seed=33)
    mark = harness.server.log.mark()
    harness.server.say(announced)
    harness.server.publish(harness.server.mine.tasks, speaker.seal(harness.server.mine.tasks, task))
    harness.settle(Play(announced, task, what, mark))


def _task_is_ignored(harness: RoundHarness, sealed: Callable[[Task], bytes]) -> None:
    """Expect no update for a task as ``sealed`` returns it, and one for the server's own task."""
    what, announced = harness.prepare()
    harness.server.say(announced)
    mark = harness.server.log.mark()
    harness.server.publish(harness.server.mine.tasks, sealed(harness.task(announced, what, seed=31)))
    harness.quiet(mark, "no update for a task that is not the server's")
    harness.settle(Play(announced, _given(harness, announced), what, mark))


def _round_is_ignored(harness: RoundHarness, sealed: Callable[[Round], bytes]) -> None:
    """Expect no update for a round as ``sealed`` returns it, and a correct next round."""
    what, announced = harness.prepare()
    mark = harness.server.log.mark()
    harness.server.publish(harness.server.topics.current_round, sealed(announced), retain=True)
    harness.server.say(harness.task(announced, what))
    harness.quiet(mark, "no update for a round that is not the server's")
    harness.good_round()


def _ack_is_ignored(harness: RoundHarness, sealed: Callable[[Ack], bytes]) -> None:
    """Expect an acknowledgement as ``sealed`` returns it to have no effect."""
    play = harness.open()
    received = harness.judged(play)
    ack = Ack(round=received.round, nonce=received.nonce, status="accepted", sha256=received.sha256)
    harness.server.publish(harness.server.mine.acks, sealed(ack))
    time.sleep(harness.patient(0.3))
    harness.sent_again(play, received)
    harness.answer(received)


def _bundle_is_refused(harness: RoundHarness, signature: bytes) -> None:
    def spoilt(announced: Round) -> Round:
        offers = {
            name: msgspec.structs.replace(
                offer, signatures={tier: signature for tier in offer.bundles if signature}
            )
            for name, offer in announced.offers.items()
        }
        return msgspec.structs.replace(announced, offers=offers)

    play = harness.open(change=spoilt)
    harness.quiet(play.mark, "no update by a bundle that no known key signed")
    harness.good_round()


def _given(harness: RoundHarness, announced: Round) -> Task:
    task = harness.task(announced, harness.material(), seed=32)
    harness.server.say(task)
    return task


def _stranger(harness: RoundHarness) -> MessageSigner:
    return speaker_of(harness.folder / "stranger.key")


def _rotated(harness: RoundHarness, overlap_s: float) -> MessageSigner:
    """Return the server's next key, which the current one introduces."""
    keys = rotate(harness.folder / "signing.key", overlap_s=overlap_s, now=time.time())
    return MessageSigner(keys, harness.server.speaker.numbers)


def _without_chain(keys: KeyPair) -> KeyPair:
    keys.successions = ()
    return keys
