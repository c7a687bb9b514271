"""Cases of agents that are killed or cut off, and have to send the update of an undisturbed round."""

from __future__ import annotations

import time

from edgefl.wire.mqtt.messages import UpdateChunk
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.material.compare import Tolerance, check_metrics, read_tensors
from edgefl_conformance.play.harness import Play, Received, RoundHarness
from edgefl_conformance.results import CaseFailed, expect, expect_equal

INTERRUPTIONS, CUTS = CaseGroup("interruptions"), CaseGroup("cuts")
_TRAINING_S = 1.5
"""Training time of a round that is killed in the middle."""


@INTERRUPTIONS.case(
    "Killed in training and started again, it gives the update that it would have given, bit for bit.",
    alone=True,
)
def killed_in_training(harness: RoundHarness) -> None:
    harness.start()
    harness.good_round()
    what = harness.material("onebit")
    slow = what.with_steps(harness.steps_that_take(what, _TRAINING_S))
    play = harness.open(slow, seed=77)
    harness.under_way(play, _TRAINING_S / 2)
    harness.kill()
    early = harness.server.log.since(play.mark, "updates")
    expect(not early, "an agent that can be killed in training", "one that had finished it")
    _again(harness, play)
    received = harness.settle(play, within_s=60.0)
    undisturbed = harness.open(slow, seed=77)
    other = harness.update(undisturbed, 60.0)
    harness.answer(other)
    _same(other, received)


@INTERRUPTIONS.case("Killed while it sends its update and started again, it sends the same update, whole.")
def killed_in_sending(harness: RoundHarness) -> None:
    play, sha256 = _half_sent(harness)
    harness.kill()
    harness.relay.release()
    mark = harness.server.log.mark()
    harness.start_again()
    _sent_whole(harness, play, sha256, mark)


@INTERRUPTIONS.case(
    "Killed while it waits for the server's word, it sends the same update again, without being asked."
)
def killed_in_waiting(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open()
    received = harness.judged(play)
    harness.kill()
    mark = harness.server.log.mark()
    harness.start_again()
    again = harness.update(play, since=mark)
    expect_equal("SHA-256 of the update", received.sha256, again.sha256)
    harness.answer(again)


@INTERRUPTIONS.case(
    "Killed after its update was accepted, it does not compute or send it again for the same task."
)
def killed_after_the_answer(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open()
    harness.settle(play)
    mark = harness.server.log.mark()
    harness.restart()
    harness.server.say(play.task)
    harness.quiet(mark, "no second update for a task whose update was accepted", seconds=2.0)
    harness.good_round()


@INTERRUPTIONS.case("Killed while it fetches, it continues with its blobs, and with the repeated task.")
def killed_in_fetching(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open(harness.material("tier"), chunk=600)
    time.sleep(0.15)
    harness.kill()
    _again(harness, play)
    harness.settle(play)


@CUTS.case("Cut off while it sends, it connects again, greets, and sends the same update, whole.")
def cut_in_sending(harness: RoundHarness) -> None:
    play, sha256 = _half_sent(harness)
    mark = harness.server.log.mark()
    harness.relay.cut()
    harness.relay.release()
    harness.status(mark, online=True)
    harness.hello(mark)
    _sent_whole(harness, play, sha256, mark)


@CUTS.case("Cut off while it trains, it trains on, and sends its update when the broker is back.")
def cut_in_training(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open(harness.material().with_steps(800))
    harness.under_way(play, 0.4)
    mark = harness.server.log.mark()
    harness.relay.close_door()
    time.sleep(harness.patient(1.0))
    harness.relay.open_door()
    harness.hello(mark)
    harness.settle(play)


@CUTS.case("Cut off while it fetches, it asks for the rest again.")
def cut_in_fetching(harness: RoundHarness) -> None:
    harness.ensure()
    play = harness.open(harness.material("tier"), chunk=600)
    for _ in range(2):
        time.sleep(0.1)
        mark = harness.server.log.mark()
        harness.relay.cut()
        harness.hello(mark)
    harness.settle(play)


def _half_sent(harness: RoundHarness) -> tuple[Play, str]:
    """Open a round with a large update and hold it back half-way; return the round and the update's digest."""
    harness.ensure()
    harness.relay.hold_after(300_000)
    play = harness.open(harness.material("big"))
    first = harness.server.log.wait(play.mark, "updates", harness.patient(30.0), lambda said: True)
    if first is None:
        raise CaseFailed("a first chunk", harness.instead(play.mark))
    assert isinstance(first.message, UpdateChunk)
    return play, first.message.sha256


def _sent_whole(harness: RoundHarness, play: Play, sha256: str, since: int) -> None:
    """Wait for the update with this digest, judge it, and accept it."""
    received = harness.judged(play, since=since)
    expect_equal("SHA-256 of the update", sha256, received.sha256)
    harness.answer(received)


def _again(harness: RoundHarness, play: Play) -> None:
    """Start the agent again, and repeat the task, like a server after a hello."""
    harness.start_again()
    harness.server.say(play.task)


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
