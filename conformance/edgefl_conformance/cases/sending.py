"""Sending an update: its chunks, and the effect of acknowledgements."""

from __future__ import annotations

import time

import msgspec

from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import RoundHarness, chunk_of
from edgefl_conformance.play.server import CHUNK_BYTES
from edgefl_conformance.results import CaseFailed, expect, expect_equal

SENDING = CaseGroup("sending")
_LEAST_DATA = 256


@SENDING.case(
    "Cuts a large update into chunks: payloads within the limit, all but the last equal, numbered as their topics say."
)
def chunks(harness: RoundHarness) -> None:
    play = harness.open(harness.material("big"))
    received = harness.judged(play)
    parts = [said.message for said in received.chunks]
    expect(len(parts) > 1, "several chunks", len(parts))
    sizes = []
    for place, (said, part) in enumerate(zip(received.chunks, parts, strict=True)):
        assert isinstance(part, UpdateChunk)
        expect_equal("numbers in the topic", (play.task.round, part.index), said.numbers)
        expect_equal("chunk.index, in order", place, part.index)
        expect_equal("chunk.count", len(parts), part.count)
        expect(
            len(said.payload) <= CHUNK_BYTES, f"payloads of at most {CHUNK_BYTES} bytes", len(said.payload)
        )
        expect(not said.retained, "chunks that are not retained", "a retained one")
        sizes.append(len(part.data))
    expect(len(set(sizes[:-1])) == 1, "equal chunks but for the last", sizes)
    expect(sizes[0] >= _LEAST_DATA, f"at least {_LEAST_DATA} bytes in a chunk", sizes[0])
    harness.answer(received)


@SENDING.case(
    "Sends the same update again, whole, when the server gives the task once more, as its answer may be lost."
)
def answer_is_lost(harness: RoundHarness) -> None:
    play = harness.open()
    received = harness.judged(play)
    harness.sent_again(play, received)
    harness.answer(received)


@SENDING.case("Sends the chunks that are missing, and those alone, whatever else the list holds.")
def missing_chunks(harness: RoundHarness) -> None:
    play = harness.open(harness.material("big"))
    received = harness.judged(play)
    mark = harness.server.log.mark()
    harness.answer(received, "missing", missing=[3, 1, 999, 1])
    harness.chunks(play, mark, {1, 3})
    time.sleep(harness.patient(0.5))
    came = [
        said.message.index
        for said in harness.server.log.since(mark, "updates")
        if isinstance(said.message, UpdateChunk)
    ]
    expect_equal("chunks that came", [1, 3], sorted(came))
    harness.answer(received)


@SENDING.case("Does nothing for an Ack of another update: another digest, or another nonce.")
def ack_of_another_update(harness: RoundHarness) -> None:
    play = harness.open()
    received = harness.update(play)
    harness.answer(received, sha256="0" * 64)
    harness.answer(received, nonce="0011223344556677")
    time.sleep(harness.patient(0.3))
    harness.sent_again(play, received)
    harness.answer(received)


@SENDING.case(
    "Takes `accepted` as final: nothing of the update comes again, by a Round, a Task, or a new connection."
)
def accepted_is_final(harness: RoundHarness) -> None:
    _final(harness, "accepted")


@SENDING.case("Takes `rejected` as final, for a reason that it does not know, too.")
def rejected_is_final(harness: RoundHarness) -> None:
    _final(harness, "rejected", reason="a-reason-of-a-later-release", text="the kit says so")


@SENDING.case("Sends below the shard that the task names.")
def shard(harness: RoundHarness) -> None:
    play = harness.open(change_task=lambda task: msgspec.structs.replace(task, shard=3))
    received = harness.judged(play)
    for said in received.chunks:
        expect_equal("numbers in the topic", (3, play.task.round), said.numbers[:2])
    harness.answer(received)


@SENDING.case(
    "Offers a large update first where the task asks for that, and sends it when its turn comes.",
    optional=True,
)
def offer(harness: RoundHarness) -> None:
    play = harness.open(
        harness.material("big"), change_task=lambda task: msgspec.structs.replace(task, ask=True)
    )
    said = harness.server.log.wait(play.mark, "updates", harness.patient(20.0), lambda said: True)
    chunk = said.message if said is not None else None
    if not isinstance(chunk, UpdateChunk) or not chunk.is_offer:
        harness.answer(harness.update(play))
        raise CaseFailed(
            "an UpdateChunk of index 0 without data", "the update itself" if chunk else "nothing"
        )
    time.sleep(harness.patient(0.5))
    early = [
        each
        for each in harness.server.log.since(play.mark, "updates")
        if (part := chunk_of(each, play.task)) and part.data
    ]
    expect(not early, "no chunk before the server asks", f"{len(early)} chunks")
    missing = list(range(chunk.count))
    ack = Ack(
        round=play.task.round, nonce=play.task.nonce, status="missing", missing=missing, sha256=chunk.sha256
    )
    harness.server.say(ack)
    harness.settle(play)


def _final(harness: RoundHarness, status: str, **fields: object) -> None:
    play = harness.open()
    received = harness.judged(play)
    harness.answer(received, status, **fields)
    time.sleep(harness.patient(0.3))
    mark = harness.server.log.mark()
    harness.server.say(play.announced)
    harness.server.say(play.task)
    harness.quiet(mark, "nothing more of an update that the server has spoken on", play.task)
    mark = harness.server.log.mark()
    harness.relay.cut()
    harness.hello(mark)
    harness.quiet(mark, "nothing more of an update that the server has spoken on", play.task)
    harness.good_round()
