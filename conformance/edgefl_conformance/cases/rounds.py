"""Plain rounds: that the update is the one that seed, data and bundle give, whatever the task asks for."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import Live, Message, Progress, Round, Task, encode
from edgefl_conformance.case import Group
from edgefl_conformance.play.pace import steps_that_take
from edgefl_conformance.play.said import Said
from edgefl_conformance.play.stage import Play, Stage, chunk_of
from edgefl_conformance.verdict import Failed, expect, expect_equal

ROUNDS = Group("rounds")


@ROUNDS.case("Trains a round, and sends an update with the expected tensors, samples and metrics.")
def plain_round(stage: Stage) -> None:
    stage.good_round()


@ROUNDS.case(
    "Walks through its rows in the shuffled order of (seed, stream), around the end and on, B rows a step."
)
def batches(stage: Stage) -> None:
    stage.good_round(stage.material().with_steps(9), seed=123456)


@ROUNDS.case("Takes seeds of 62 bits and more as they are.")
def large_seed(stage: Stage) -> None:
    stage.good_round(seed=2**62 + 1)
    stage.good_round(seed=2**63 - 1)


@ROUNDS.case("Uses the first Task.samples rows alone, and says how many it used.")
def fewer_samples(stage: Stage) -> None:
    stage.good_round(samples=13)


@ROUNDS.case(
    "Draws batches with replacement, by (seed, stream, step), where there are fewer rows than a batch has."
)
def few_rows(stage: Stage) -> None:
    stage.good_round(samples=5, seed=11)


@ROUNDS.case("Takes scalars from the announcement before those of the manifest.")
def hyper_of_the_round(stage: Stage) -> None:
    stage.good_round(hyper={"lr": 0.5})


@ROUNDS.case("Takes scalars that only the manifest has from there, in each round anew.")
def hyper_of_the_manifest(stage: Stage) -> None:
    manifest = stage.material().manifest
    stage.good_round(stage.material().changed(hyper={**manifest.hyper, "lr": 0.25}))


@ROUNDS.case(
    "Passes over fields that it does not know: in a Round, a Task, an Offer, a reference of a blob and a manifest."
)
def unknown_fields(stage: Stage) -> None:
    what = stage.material()
    _, units = stage.offer(what)
    published = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.published[-1]))
    for part in (
        published,
        published["phases"][0],
        published["graphs"][0],
        published["graphs"][0]["inputs"][0],
    ):
        part["added_later"] = {"deep": [1, None, b"x"]}
    announced = stage.announcement(stage.offered(what.manifest.tier, published), units)
    task = stage.task(announced, what)
    fields = _fields(announced)
    fields["added_later"] = {"deep": [1, None, b"x"]}
    for part in (fields["offers"][stage.setup.engine], fields["units"][next(iter(units))][0]):
        part["added_later"] = 1
    mark = stage.server.log.mark()
    _say_fields(stage, Round, fields)
    _say_fields(stage, Task, {"added_later": [1], **_fields(task)})
    stage.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Reads numbers as others write them: integers and float 32 for floats, long integers for short ones, infinities."
)
def other_widths(stage: Stage) -> None:
    what, announced = stage.prepare(hyper={"lr": 0.5})
    task = stage.task(announced, what)
    fields, half = _fields(announced), b"\xca\x3f\x00\x00\x00"
    fields["deadline"] = math.inf
    fields["hyper"] = {"lr": msgspec.Raw(half), "unused": 3}
    given = {**_fields(task), "round": msgspec.Raw(b"\xd3" + task.round.to_bytes(8, "big"))}
    mark = stage.server.log.mark()
    _say_fields(stage, Round, fields)
    _say_fields(stage, Task, given)
    stage.settle(Play(announced, task, what, mark, {"lr": 0.5}))


@ROUNDS.case("Takes a Task that comes before the Round that it belongs to.")
def task_before_round(stage: Stage) -> None:
    what, announced = stage.prepare()
    task = stage.task(announced, what)
    mark = stage.server.log.mark()
    stage.server.say(task)
    time.sleep(stage.patient(0.2))
    stage.server.say(announced)
    stage.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Does nothing for a Task whose update was accepted, when it comes again: as a copy, or signed anew."
)
def task_again(stage: Stage) -> None:
    stage.ensure()
    play = stage.open()
    received = stage.update(play)
    stage.answer(received)
    time.sleep(stage.patient(0.2))
    mark = stage.server.log.mark()
    payload = stage.server.say(play.task)
    stage.server.publish(stage.server.mine.tasks, payload)
    stage.quiet(mark, "no second update for a task whose update was accepted")


@ROUNDS.case("Works on a later task of a round that gives several, and drops the one in hand for it.")
def another_task(stage: Stage) -> None:
    stage.ensure()
    what = stage.material()
    slow = what.with_steps(steps_that_take(stage, what, 1.5))
    play = stage.open(slow)
    stage.under_way(play, 0.3)
    done = stage.update_or_none(play.task, 0.0, play.mark)
    if done is not None:  # too quick to be given another one meanwhile
        stage.answer(done)
    mark = stage.server.log.mark()
    task = stage.task(play.announced, slow, seed=99)
    stage.server.say(task)
    stage.answer(
        stage.update(Play(play.announced, task, slow, mark))
    )  # its values: engines part over so many steps
    late = [each for each in stage.server.log.since(mark, "updates") if chunk_of(each, play.task)]
    expect(not late, "no update for a task that another one followed", f"{len(late)} chunks of one")


@ROUNDS.case(
    "Goes on with a task of an earlier round that still takes updates (Round.live), and sends it for that round."
)
def earlier_round(stage: Stage) -> None:
    play = stage.open(stage.material().with_steps(400))
    own = play.announced
    live = Live(model_version=own.model_version, units=own.units, hyper=own.hyper)
    later = msgspec.structs.replace(
        stage.announcement(own.offers[stage.setup.engine], own.units), live={own.round: live}
    )
    stage.server.say(later)
    stage.settle(play)


@ROUNDS.case("Takes a task after rounds that it had no part in, whether or not it rests meanwhile.")
def rests(stage: Stage) -> None:
    stage.ensure()
    what = stage.material()
    offer, units = stage.offer(what)
    for _ in range(4):
        announced = stage.announcement(offer, units)
        stage.server.say(announced)
        time.sleep(0.1)
    task = stage.task(announced, what)
    mark = stage.server.log.mark()
    stage.server.say(task)
    stage.settle(Play(announced, task, what, mark))


@ROUNDS.case(
    "Says how far it is: Progress of its task, five times a second at most, steps within their number.",
    optional=True,
)
def progress(stage: Stage) -> None:
    play = stage.open(stage.material().with_steps(1500))
    within = stage.patient(10.0)
    if stage.server.log.wait(play.mark, "progress", within, lambda said: _of(said, play)) is None:
        raise Failed("Progress with the stage `train`", stage.instead(play.mark))
    stage.answer(stage.update(play))
    steps = [each for each in stage.server.log.since(play.mark, "progress") if _of(each, play)]
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
    "Goes on after messages that nobody can read: garbage, another version, a missing field, an empty payload."
)
def garbage(stage: Stage) -> None:
    stage.ensure()
    mine = stage.server.mine
    task = Task(run="r", round=1, tier="t", seed=1, nonce="00112233")
    fields = _fields(task)
    del fields["nonce"]
    for topic in (mine.tasks, mine.acks, stage.server.topics.current_round):
        for payload in (b"\xc1", b"\x00" * 40, b"", encode(task)[:-3], b"\x91" * 5000):
            stage.server.publish(topic, payload)
    other = msgspec.msgpack.encode({**_fields(task), "v": 99})
    for body in (msgspec.msgpack.encode(fields), other, b"", b"\xff" * 9):
        stage.server.publish(mine.tasks, stage.server.seal_body(Task, mine.tasks, body))
    stage.server.publish(mine.tasks, stage.server.seal_body(Task, mine.tasks, encode(task), v=7))
    stage.good_round()


def _of(said: Said, play: Play) -> bool:
    message = said.message
    return isinstance(message, Progress) and message.round == play.task.round and message.stage == "train"


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return fields


def _say_fields(stage: Stage, kind: type[Message], fields: dict[str, Any]) -> None:
    topic = stage.server.topics.current_round if kind is Round else stage.server.mine.tasks
    payload = stage.server.seal_body(kind, topic, msgspec.msgpack.encode(fields))
    stage.server.publish(topic, payload, retain=kind is Round)
