"""Plain rounds: seed, data and bundle determine the update."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import LiveRound, Message, Progress, Round, Task, encode
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import Play, RoundHarness, chunk_of
from edgefl_conformance.play.messages import AgentMessage
from edgefl_conformance.results import CaseFailed, expect, expect_equal

ROUNDS = CaseGroup("rounds")


@ROUNDS.case("Trains a round, and sends an update with the expected tensors, samples and metrics.")
def plain_round(harness: RoundHarness) -> None:
    harness.good_round()


@ROUNDS.case(
    "Walks through its rows in the shuffled order of (seed, stream), around the end and on, B rows a step."
)
def batches(harness: RoundHarness) -> None:
    harness.good_round(harness.material().with_steps(9), seed=123456)


@ROUNDS.case("Takes seeds of 62 bits and more as they are.")
def large_seed(harness: RoundHarness) -> None:
    harness.good_round(seed=2**62 + 1)
    harness.good_round(seed=2**63 - 1)


@ROUNDS.case("Uses the first Task.samples rows alone, and says how many it used.")
def fewer_samples(harness: RoundHarness) -> None:
    harness.good_round(samples=13)


@ROUNDS.case(
    "Draws batches with replacement, by (seed, stream, step), where there are fewer rows than a batch has."
)
def few_rows(harness: RoundHarness) -> None:
    harness.good_round(samples=5, seed=11)


@ROUNDS.case("Takes scalars from the announcement before those of the manifest.")
def hyper_of_the_round(harness: RoundHarness) -> None:
    harness.good_round(hyper={"lr": 0.5})


@ROUNDS.case("Takes scalars that only the manifest has from there, in each round anew.")
def hyper_of_the_manifest(harness: RoundHarness) -> None:
    manifest = harness.material().manifest
    harness.good_round(harness.material().changed(hyper={**manifest.hyper, "lr": 0.25}))


@ROUNDS.case(
    "Passes over fields that it does not know: in a Round, a Task, an Offer, a reference of a blob and a manifest."
)
def unknown_fields(harness: RoundHarness) -> None:
    what = harness.material()
    _, units = harness.offer(what)
    published = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.published[-1]))
    for part in (
        published,
        published["phases"][0],
        published["graphs"][0],
        published["graphs"][0]["inputs"][0],
    ):
        part["added_later"] = {"deep": [1, None, b"x"]}
    announced = harness.announcement(harness.offered(what.manifest.tier, published), units)
    task = harness.task(announced, what)
    fields = _fields(announced)
    fields["added_later"] = {"deep": [1, None, b"x"]}
    for part in (fields["offers"][harness.setup.engine], fields["units"][next(iter(units))][0]):
        part["added_later"] = 1
    mark = harness.server.log.mark()
    _say_fields(harness, Round, fields)
    _say_fields(harness, Task, {"added_later": [1], **_fields(task)})
    harness.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Reads numbers as others write them: integers and float 32 for floats, long integers for short ones, infinities."
)
def other_widths(harness: RoundHarness) -> None:
    what, announced = harness.prepare(hyper={"lr": 0.5})
    task = harness.task(announced, what)
    fields, half = _fields(announced), b"\xca\x3f\x00\x00\x00"
    fields["deadline"] = math.inf
    fields["hyper"] = {"lr": msgspec.Raw(half), "unused": 3}
    given = {**_fields(task), "round": msgspec.Raw(b"\xd3" + task.round.to_bytes(8, "big"))}
    mark = harness.server.log.mark()
    _say_fields(harness, Round, fields)
    _say_fields(harness, Task, given)
    harness.settle(Play(announced, task, what, mark, {"lr": 0.5}))


@ROUNDS.case("Takes a Task that comes before the Round that it belongs to.")
def task_before_round(harness: RoundHarness) -> None:
    what, announced = harness.prepare()
    task = harness.task(announced, what)
    mark = harness.server.log.mark()
    harness.server.say(task)
    time.sleep(harness.patient(0.2))
    harness.server.say(announced)
    harness.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Does nothing for a Task whose update was accepted, when it comes again: as a copy, or signed anew."
)
def task_again(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open()
    received = harness.update(play)
    harness.answer(received)
    time.sleep(harness.patient(0.2))
    mark = harness.server.log.mark()
    payload = harness.server.say(play.task)
    harness.server.publish(harness.server.mine.tasks, payload)
    harness.quiet(mark, "no second update for a task whose update was accepted")


@ROUNDS.case("Works on a later task of a round that gives several, and drops the one in hand for it.")
def another_task(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material()
    slow = what.with_steps(harness.steps_that_take(what, 1.5))
    play = harness.open(slow)
    harness.under_way(play, 0.3)
    done = harness.update_or_none(play.task, 0.0, play.mark)
    if done is not None:  # too quick to be given another one meanwhile
        harness.answer(done)
    mark = harness.server.log.mark()
    task = harness.task(play.announced, slow, seed=99)
    harness.server.say(task)
    # Without its values, because engines part over so many steps.
    harness.answer(harness.update(Play(play.announced, task, slow, mark)))
    late = [each for each in harness.server.log.since(mark, "updates") if chunk_of(each, play.task)]
    expect(not late, "no update for a task that another one followed", f"{len(late)} chunks of one")


@ROUNDS.case(
    "Continues with a task of an earlier round that still takes updates (Round.live), and sends it for that round."
)
def earlier_round(harness: RoundHarness) -> None:
    play = harness.open(harness.material().with_steps(400))
    own = play.announced
    live = LiveRound(model_version=own.model_version, units=own.units, hyper=own.hyper)
    later = msgspec.structs.replace(
        harness.announcement(own.offers[harness.setup.engine], own.units), live={own.round: live}
    )
    harness.server.say(later)
    harness.settle(play)


@ROUNDS.case("Takes a task after rounds that it had no part in, whether or not it rests meanwhile.")
def rests(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material()
    offer, units = harness.offer(what)
    for _ in range(4):
        announced = harness.announcement(offer, units)
        harness.server.say(announced)
        time.sleep(0.1)
    task = harness.task(announced, what)
    mark = harness.server.log.mark()
    harness.server.say(task)
    harness.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Says how far it is: Progress of its task, five times a second at most, steps within their number.",
    optional=True,
)
def progress(harness: RoundHarness) -> None:
    play = harness.open(harness.material().with_steps(1500))
    within = harness.patient(10.0)
    if harness.server.log.wait(play.mark, "progress", within, lambda said: _of(said, play)) is None:
        raise CaseFailed("Progress with the stage `train`", harness.instead(play.mark))
    harness.answer(harness.update(play))
    steps = [each for each in harness.server.log.since(play.mark, "progress") if _of(each, play)]
    for each in steps:
        message = each.message
        assert isinstance(message, Progress)
        expect_equal("progress.tier", play.task.tier, message.tier)
        expect(0 <= message.step <= message.steps, "step within steps", f"{message.step} of {message.steps}")
        expect(not each.retained, "Progress that is not retained", "a retained one")
    spent = steps[-1].when - steps[0].when
    most = 2 + 6 * spent
    expect(len(steps) <= most, f"at most five a second ({most:.0f} in {spent:.1f} s)", len(steps))


@ROUNDS.case(
    "Continues after unreadable messages: garbage, another version, a missing field, an empty payload."
)
def garbage(harness: RoundHarness) -> None:
    harness.ensure()
    mine = harness.server.mine
    task = Task(run="r", round=1, tier="t", seed=1, nonce="00112233")
    fields = _fields(task)
    del fields["nonce"]
    for topic in (mine.tasks, mine.acks, harness.server.topics.current_round):
        for payload in (b"\xc1", b"\x00" * 40, b"", encode(task)[:-3], b"\x91" * 5000):
            harness.server.publish(topic, payload)
    other = msgspec.msgpack.encode({**_fields(task), "v": 99})
    for body in (msgspec.msgpack.encode(fields), other, b"", b"\xff" * 9):
        harness.server.publish(mine.tasks, harness.server.seal_body(Task, mine.tasks, body))
    harness.server.publish(mine.tasks, harness.server.seal_body(Task, mine.tasks, encode(task), v=7))
    harness.good_round()


def _of(said: AgentMessage, play: Play) -> bool:
    message = said.message
    return isinstance(message, Progress) and message.round == play.task.round and message.stage == "train"


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return fields


def _say_fields(harness: RoundHarness, kind: type[Message], fields: dict[str, Any]) -> None:
    topic = harness.server.topics.current_round if kind is Round else harness.server.mine.tasks
    payload = harness.server.seal_body(kind, topic, msgspec.msgpack.encode(fields))
    harness.server.publish(topic, payload, retain=kind is Round)
