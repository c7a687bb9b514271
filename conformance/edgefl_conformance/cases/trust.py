"""Cases of signatures: an agent acts on messages of known keys only."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from edgefl.wire.keys import KeyPair, Succession, rotate
from edgefl.wire.mqtt.envelope import Envelope, MessageSigner
from edgefl.wire.mqtt.messages import Ack, Round, Task, encode
from edgefl_conformance.case import Group
from edgefl_conformance.play.server import speaker_of
from edgefl_conformance.play.stage import Play, Stage

TRUST = Group("trust")


@TRUST.case("Does nothing for a bare Task, as it knows the server's key.")
def bare_task(stage: Stage) -> None:
    _task_is_ignored(stage, encode)


@TRUST.case("Does nothing for a bare Round, as it knows the server's key.")
def bare_round(stage: Stage) -> None:
    _round_is_ignored(stage, encode)


@TRUST.case("Does not drop its update for a bare Ack: it sends it again.")
def bare_ack(stage: Stage) -> None:
    _ack_is_ignored(stage, encode)


@TRUST.case("Does nothing for a Task that another key signed.")
def task_of_a_stranger(stage: Stage) -> None:
    stranger = _stranger(stage)
    _task_is_ignored(stage, lambda task: stranger.seal(stage.server.mine.tasks, task))


@TRUST.case("Does nothing for a Round that another key signed, and goes on with the server's own.")
def round_of_a_stranger(stage: Stage) -> None:
    stranger = _stranger(stage)
    _round_is_ignored(stage, lambda announced: stranger.seal(stage.server.topics.current_round, announced))


@TRUST.case("Does not drop its update for an Ack that another key signed: it sends it again.")
def ack_of_a_stranger(stage: Stage) -> None:
    stranger = _stranger(stage)
    _ack_is_ignored(stage, lambda ack: stranger.seal(stage.server.mine.acks, ack))


@TRUST.case("Does nothing for a Task whose signature does not hold.")
def wrong_signature(stage: Stage) -> None:
    def spoilt(task: Task) -> bytes:
        whole = msgspec.msgpack.decode(stage.server.seal(stage.server.mine.tasks, task), type=Envelope)
        other = encode(msgspec.structs.replace(task, seed=task.seed + 1))
        return msgspec.msgpack.encode(msgspec.structs.replace(whole, body=other))

    _task_is_ignored(stage, spoilt)


@TRUST.case(
    "Does nothing for a Task that was signed for another device's topic, or as another kind of message."
)
def wrong_place(stage: Stage) -> None:
    elsewhere = stage.server.topics.device("agent-2").tasks
    _task_is_ignored(stage, lambda task: stage.server.seal(elsewhere, task))
    topic = stage.server.mine.tasks
    _task_is_ignored(stage, lambda task: stage.server.seal_body(Ack, topic, encode(task)))


@TRUST.case("Loads no ExecuTorch bundle without a signature of a key that it knows.", engines=("executorch",))
def unsigned_bundle(stage: Stage) -> None:
    _bundle_is_refused(stage, b"")


@TRUST.case("Loads no ExecuTorch bundle that another key signed.", engines=("executorch",))
def bundle_of_a_stranger(stage: Stage) -> None:
    stranger = _stranger(stage)
    ref = stage.offer(stage.material())[0].bundles[stage.material().manifest.tier]
    _bundle_is_refused(stage, stranger.keys.sign(f"edgefl/v1/bundle/{ref.sha256}".encode()))


@TRUST.case(
    "Without a key, trusts the first that signs a Round, and remembers it over a restart.", alone=True
)
def trust_on_first_use(stage: Stage) -> None:
    stage.start(known=False)
    stage.good_round()
    stranger = _stranger(stage)
    _task_is_ignored(stage, lambda task: stranger.seal(stage.server.mine.tasks, task))
    what, announced = stage.prepare()
    stage.restart_before(stranger.seal(stage.server.topics.current_round, announced))
    mark = stage.server.log.mark()
    task = stage.task(announced, what)
    stage.server.publish(stage.server.mine.tasks, stranger.seal(stage.server.mine.tasks, task))
    stage.quiet(mark, "no update for somebody who was there first after a restart")
    stage.good_round()


@TRUST.case(
    "Follows a key that the known one introduces (succession), hears the old one's tasks, and remembers it.",
    alone=True,
)
def succession(stage: Stage) -> None:
    stage.start()
    stage.good_round()
    old, new = stage.server.speaker, _rotated(stage, overlap_s=3600.0)
    stage.server.speaker = new
    stage.good_round()
    _task_is_heard(stage, old)
    _round_is_ignored(stage, lambda announced: old.seal(stage.server.topics.current_round, announced))
    stage.server.speaker = MessageSigner(_without_chain(new.keys), new.numbers)
    over = msgspec.structs.replace(stage.announcement(*stage.offer(stage.material())), state="closed")
    stage.restart_before(stage.server.seal(stage.server.topics.current_round, over))
    stage.good_round()


@TRUST.case("Does nothing for the tasks of a key whose time is over (succession, `until`).", alone=True)
def expired_key(stage: Stage) -> None:
    stage.start()
    stage.good_round()
    old, new = stage.server.speaker, _rotated(stage, overlap_s=-60.0)
    stage.server.speaker = new
    stage.good_round()
    _task_is_ignored(stage, lambda task: old.seal(stage.server.mine.tasks, task))


@TRUST.case("Follows no key that somebody else introduces.", alone=True)
def forged_succession(stage: Stage) -> None:
    stage.start()
    stage.good_round()
    stranger = _stranger(stage)
    text = f"edgefl/succession/1\n{stage.server.key}\n{stranger.keys.public_key}\n{1 << 40}\n".encode()
    statement = Succession(
        old=bytes.fromhex(stage.server.key),
        new=stranger.keys.public,
        until=1 << 40,
        signature=stranger.keys.sign(text),
    )

    def forged(announced: Round) -> bytes:
        whole = msgspec.msgpack.decode(
            stranger.seal(stage.server.topics.current_round, announced), type=Envelope
        )
        return msgspec.msgpack.encode(msgspec.structs.replace(whole, succession=(statement,)))

    _round_is_ignored(stage, forged)


# -- what is ignored -------------------------------------------------------------------------------------------------


def _task_is_heard(stage: Stage, speaker: MessageSigner) -> None:
    """A task that ``speaker`` signed, in a round of the server's, is worked on."""
    what, announced = stage.prepare()
    task = stage.task(announced, what, seed=33)
    mark = stage.server.log.mark()
    stage.server.say(announced)
    stage.server.publish(stage.server.mine.tasks, speaker.seal(stage.server.mine.tasks, task))
    stage.settle(Play(announced, task, what, mark))


def _task_is_ignored(stage: Stage, sealed: Callable[[Task], bytes]) -> None:
    """A task in an open round, as ``sealed`` has it, does nothing; one as it has to be does."""
    what, announced = stage.prepare()
    stage.server.say(announced)
    mark = stage.server.log.mark()
    stage.server.publish(stage.server.mine.tasks, sealed(stage.task(announced, what, seed=31)))
    stage.quiet(mark, "no update for a task that is not the server's")
    stage.settle(Play(announced, _given(stage, announced), what, mark))


def _round_is_ignored(stage: Stage, sealed: Callable[[Round], bytes]) -> None:
    """A round, announced as ``sealed`` has it, is not trained; the next one is."""
    what, announced = stage.prepare()
    mark = stage.server.log.mark()
    stage.server.publish(stage.server.topics.current_round, sealed(announced), retain=True)
    stage.server.say(stage.task(announced, what))
    stage.quiet(mark, "no update for a round that is not the server's")
    stage.good_round()


def _ack_is_ignored(stage: Stage, sealed: Callable[[Ack], bytes]) -> None:
    """An acknowledgement, as ``sealed`` has it, does not settle an update."""
    play = stage.open()
    received = stage.judged(play)
    ack = Ack(round=received.round, nonce=received.nonce, status="accepted", sha256=received.sha256)
    stage.server.publish(stage.server.mine.acks, sealed(ack))
    time.sleep(stage.patient(0.3))
    stage.sent_again(play, received)
    stage.answer(received)


def _bundle_is_refused(stage: Stage, signature: bytes) -> None:
    def spoilt(announced: Round) -> Round:
        offers = {
            name: msgspec.structs.replace(
                offer, signatures={tier: signature for tier in offer.bundles if signature}
            )
            for name, offer in announced.offers.items()
        }
        return msgspec.structs.replace(announced, offers=offers)

    play = stage.open(change=spoilt)
    stage.quiet(play.mark, "no update by a bundle that no known key signed")
    stage.good_round()


def _given(stage: Stage, announced: Round) -> Task:
    task = stage.task(announced, stage.material(), seed=32)
    stage.server.say(task)
    return task


def _stranger(stage: Stage) -> MessageSigner:
    return speaker_of(stage.folder / "stranger.key")


def _rotated(stage: Stage, overlap_s: float) -> MessageSigner:
    """The server's next key, which the one that it has introduces."""
    keys = rotate(stage.folder / "signing.key", overlap_s=overlap_s, now=time.time())
    return MessageSigner(keys, stage.server.speaker.numbers)


def _without_chain(keys: KeyPair) -> KeyPair:
    keys.successions = ()
    return keys
