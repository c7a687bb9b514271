"""Cases of agents that are killed or cut off, and have to send the update of an undisturbed round."""

from __future__ import annotations

import time

from edgefl.wire.mqtt.messages import UpdateChunk
from edgefl_conformance.case import Group
from edgefl_conformance.material.compare import Tolerance, check_metrics, read_tensors
from edgefl_conformance.play.pace import steps_that_take
from edgefl_conformance.play.stage import Play, Received, Stage
from edgefl_conformance.verdict import Failed, expect, expect_equal

INTERRUPTIONS, CUTS = Group("interruptions"), Group("cuts")
_TRAINING_S = 1.5
"""Of a round that is killed in the middle."""


@INTERRUPTIONS.case(
    "Killed in training and started again, it gives the update that it would have given, bit for bit.",
    alone=True,
)
def killed_in_training(stage: Stage) -> None:
    stage.start()
    stage.good_round()
    what = stage.material("onebit")
    slow = what.with_steps(steps_that_take(stage, what, _TRAINING_S))
    play = stage.open(slow, seed=77)
    stage.under_way(play, _TRAINING_S / 2)
    stage.kill()
    early = stage.server.log.since(play.mark, "updates")
    expect(not early, "an agent that can be killed in training", "one that had finished it")
    _again(stage, play)
    received = stage.settle(play, within_s=60.0)
    undisturbed = stage.open(slow, seed=77)
    other = stage.update(undisturbed, 60.0)
    stage.answer(other)
    _same(other, received)


@INTERRUPTIONS.case("Killed while it sends its update and started again, it sends the same update, whole.")
def killed_in_sending(stage: Stage) -> None:
    play, sha256 = _half_sent(stage)
    stage.kill()
    stage.relay.release()
    mark = stage.server.log.mark()
    stage.start_again()
    _sent_whole(stage, play, sha256, mark)


@INTERRUPTIONS.case(
    "Killed while it waits for the server's word, it sends the same update again, without being asked."
)
def killed_in_waiting(stage: Stage) -> None:
    stage.ensure()
    play = stage.open()
    received = stage.judged(play)
    stage.kill()
    mark = stage.server.log.mark()
    stage.start_again()
    again = stage.update(play, since=mark)
    expect_equal("SHA-256 of the update", received.sha256, again.sha256)
    stage.answer(again)


@INTERRUPTIONS.case(
    "Killed after its update was accepted, it does not compute or send it again for the same task."
)
def killed_after_the_answer(stage: Stage) -> None:
    stage.ensure()
    play = stage.open()
    stage.settle(play)
    mark = stage.server.log.mark()
    stage.restart()
    stage.server.say(play.task)
    stage.quiet(mark, "no second update for a task whose update was accepted", seconds=2.0)
    stage.good_round()


@INTERRUPTIONS.case(
    "Killed while it fetches, it goes on with what it has, and with the task that comes again."
)
def killed_in_fetching(stage: Stage) -> None:
    stage.ensure()
    play = stage.open(stage.material("tier"), chunk=600)
    time.sleep(0.15)
    stage.kill()
    _again(stage, play)
    stage.settle(play)


@CUTS.case("Cut off while it sends, it connects again, greets, and sends the same update, whole.")
def cut_in_sending(stage: Stage) -> None:
    play, sha256 = _half_sent(stage)
    mark = stage.server.log.mark()
    stage.relay.cut()
    stage.relay.release()
    stage.status(mark, online=True)
    stage.hello(mark)
    _sent_whole(stage, play, sha256, mark)


@CUTS.case("Cut off while it trains, it trains on, and sends its update when the broker is there again.")
def cut_in_training(stage: Stage) -> None:
    stage.ensure()
    play = stage.open(stage.material().with_steps(800))
    stage.under_way(play, 0.4)
    mark = stage.server.log.mark()
    stage.relay.close_door()
    time.sleep(stage.patient(1.0))
    stage.relay.open_door()
    stage.hello(mark)
    stage.settle(play)


@CUTS.case("Cut off while it fetches, it asks for the rest again.")
def cut_in_fetching(stage: Stage) -> None:
    stage.ensure()
    play = stage.open(stage.material("tier"), chunk=600)
    for _ in range(2):
        time.sleep(0.1)
        mark = stage.server.log.mark()
        stage.relay.cut()
        stage.hello(mark)
    stage.settle(play)


def _half_sent(stage: Stage) -> tuple[Play, str]:
    """Open a round with a large update and hold it back half-way; return the round and the update's digest."""
    stage.ensure()
    stage.relay.hold_after(300_000)
    play = stage.open(stage.material("big"))
    first = stage.server.log.wait(play.mark, "updates", stage.patient(30.0), lambda said: True)
    if first is None:
        raise Failed("a first chunk", stage.instead(play.mark))
    assert isinstance(first.message, UpdateChunk)
    return play, first.message.sha256


def _sent_whole(stage: Stage, play: Play, sha256: str, since: int) -> None:
    """Wait for the update with this digest, judge it, and accept it."""
    received = stage.judged(play, since=since)
    expect_equal("SHA-256 of the update", sha256, received.sha256)
    stage.answer(received)


def _again(stage: Stage, play: Play) -> None:
    """Start the agent again; a server gives the task once more after a hello."""
    stage.start_again()
    stage.server.say(play.task)


def _same(undisturbed: Received, interrupted: Received) -> None:
    wanted, found = read_tensors(undisturbed.update), read_tensors(interrupted.update)
    expect_equal("tensors of the update", sorted(wanted), sorted(found))
    for name, array in wanted.items():
        differ = int((array != found[name]).sum())
        expect(
            differ == 0,
            f"{name} as in the undisturbed update, bit for bit",
            f"{differ} of {array.size} differ",
        )
    check_metrics(undisturbed.update.metrics, interrupted.update.metrics, Tolerance(metric=1e-6))
