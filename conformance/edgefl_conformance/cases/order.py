"""Cases of messages that arrive too late, twice, or from another run."""

from __future__ import annotations

import time

import msgspec

from edgefl.wire.mqtt.messages import Ack
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import Play, RoundHarness

ORDER = CaseGroup("order")


@ORDER.case("Does nothing for a Round that the server said before another one (a lower `at`).")
def older_round(harness: RoundHarness) -> None:
    harness.ensure()
    old = _closed_round(harness)
    mark = harness.server.log.mark()
    harness.server.publish(harness.server.topics.current_round, old[0], retain=True)
    harness.server.say(old[1].task)
    harness.quiet(mark, "no update for a round that was closed, and whose announcement somebody says again")
    harness.good_round()


@ORDER.case("Does nothing for such a Round after a restart, either.")
def older_round_after_a_restart(harness: RoundHarness) -> None:
    harness.ensure()
    harness.good_round()
    old = _closed_round(harness)
    mark = harness.server.log.mark()
    harness.restart_before(old[0])
    harness.server.say(old[1].task)
    harness.quiet(mark, "no update for a round that was closed, and whose announcement somebody says again")
    harness.good_round()


@ORDER.case("Does nothing for a Task that the server said before another one (a lower `at`).")
def older_task(harness: RoundHarness) -> None:
    what, announced = harness.prepare()
    harness.server.say(announced)
    early = harness.server.seal(harness.server.mine.tasks, harness.task(announced, what, seed=41))
    task = harness.task(announced, what, seed=42)
    mark = harness.server.log.mark()
    harness.server.say(task)
    harness.settle(Play(announced, task, what, mark))
    time.sleep(harness.patient(0.2))
    mark = harness.server.log.mark()
    harness.server.publish(harness.server.mine.tasks, early)
    harness.quiet(mark, "no update for a task that is older than the last one")


@ORDER.case("Does not drop its update for an Ack that the server said before another one (a lower `at`).")
def older_ack(harness: RoundHarness) -> None:
    play = harness.open(harness.material("big"))
    received = harness.update(play)
    accepted = Ack(round=received.round, nonce=received.nonce, status="accepted", sha256=received.sha256)
    early = harness.server.seal(harness.server.mine.acks, accepted)
    mark = harness.server.log.mark()
    harness.answer(received, "missing", missing=[0])
    harness.chunks(play, mark, {0})
    harness.server.publish(harness.server.mine.acks, early)
    time.sleep(harness.patient(0.3))
    harness.sent_again(play, received)
    harness.answer(received)


@ORDER.case("Does nothing for a Task of another run than the one that is announced.")
def another_run(harness: RoundHarness) -> None:
    what, announced = harness.prepare()
    harness.server.say(announced)
    task = msgspec.structs.replace(harness.task(announced, what), run="another-run")
    mark = harness.server.log.mark()
    harness.server.say(task)
    harness.quiet(mark, "no update for a task of another run")
    harness.good_round()


@ORDER.case("Does nothing for a Task of a round that is over, or closed.")
def closed_round(harness: RoundHarness) -> None:
    what, over = harness.prepare()
    announced = harness.announcement(over.offers[harness.setup.engine], over.units)
    harness.server.say(announced)
    mark = harness.server.log.mark()
    harness.server.say(harness.task(over, what))
    harness.quiet(mark, "no update for a task of a round that is over")
    harness.server.say(msgspec.structs.replace(announced, state="closed"))
    mark = harness.server.log.mark()
    harness.server.say(harness.task(announced, what))
    harness.quiet(mark, "no update for a task of a round that is closed")
    harness.good_round()


@ORDER.case("Stops its work on a round that closes, and sends no update for it.")
def round_closes(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material()
    play = harness.open(what.with_steps(harness.steps_that_take(what, 1.5)))
    harness.under_way(play, 0.4)
    harness.close(play)
    mark = harness.server.log.mark()
    harness.quiet(mark, "no update for a round that closed while it was worked on", seconds=2.0)
    harness.good_round()


@ORDER.case("Takes the server's word on whether a round is open, and not its own clock on the deadline.")
def deadline_is_advisory(harness: RoundHarness) -> None:
    play = harness.open(
        change=lambda announced: msgspec.structs.replace(announced, deadline=time.time() - 86400)
    )
    harness.settle(play)


def _closed_round(harness: RoundHarness) -> tuple[bytes, Play]:
    """Announce and close a round without a task; return its announcement, and a task for it."""
    what, announced = harness.prepare()
    payload = harness.server.say(announced)
    play = Play(announced, harness.task(announced, what), what, harness.server.log.mark())
    harness.close(play)
    return payload, play
