"""Cases of messages that arrive too late, twice, or from another run."""

from __future__ import annotations

import time

import msgspec

from edgefl.wire.mqtt.messages import Ack
from edgefl_conformance.case import Group
from edgefl_conformance.play.pace import steps_that_take
from edgefl_conformance.play.stage import Play, Stage

ORDER = Group("order")


@ORDER.case("Does nothing for a Round that the server said before another one (a lower `at`).")
def older_round(stage: Stage) -> None:
    stage.ensure()
    old = _closed_round(stage)
    mark = stage.server.log.mark()
    stage.server.publish(stage.server.topics.current_round, old[0], retain=True)
    stage.server.say(old[1].task)
    stage.quiet(mark, "no update for a round that was closed, and whose announcement somebody says again")
    stage.good_round()


@ORDER.case("Does nothing for such a Round after a restart, either.")
def older_round_after_a_restart(stage: Stage) -> None:
    stage.ensure()
    stage.good_round()
    old = _closed_round(stage)
    mark = stage.server.log.mark()
    stage.restart_before(old[0])
    stage.server.say(old[1].task)
    stage.quiet(mark, "no update for a round that was closed, and whose announcement somebody says again")
    stage.good_round()


@ORDER.case("Does nothing for a Task that the server said before another one (a lower `at`).")
def older_task(stage: Stage) -> None:
    what, announced = stage.prepare()
    stage.server.say(announced)
    early = stage.server.seal(stage.server.mine.tasks, stage.task(announced, what, seed=41))
    task = stage.task(announced, what, seed=42)
    mark = stage.server.log.mark()
    stage.server.say(task)
    stage.settle(Play(announced, task, what, mark))
    time.sleep(stage.patient(0.2))
    mark = stage.server.log.mark()
    stage.server.publish(stage.server.mine.tasks, early)
    stage.quiet(mark, "no update for a task that is older than the last one")


@ORDER.case("Does not drop its update for an Ack that the server said before another one (a lower `at`).")
def older_ack(stage: Stage) -> None:
    play = stage.open(stage.material("big"))
    received = stage.update(play)
    accepted = Ack(round=received.round, nonce=received.nonce, status="accepted", sha256=received.sha256)
    early = stage.server.seal(stage.server.mine.acks, accepted)
    mark = stage.server.log.mark()
    stage.answer(received, "missing", missing=[0])
    stage.chunks(play, mark, {0})
    stage.server.publish(stage.server.mine.acks, early)
    time.sleep(stage.patient(0.3))
    stage.sent_again(play, received)
    stage.answer(received)


@ORDER.case("Does nothing for a Task of another run than the one that is announced.")
def another_run(stage: Stage) -> None:
    what, announced = stage.prepare()
    stage.server.say(announced)
    task = msgspec.structs.replace(stage.task(announced, what), run="another-run")
    mark = stage.server.log.mark()
    stage.server.say(task)
    stage.quiet(mark, "no update for a task of another run")
    stage.good_round()


@ORDER.case("Does nothing for a Task of a round that is over, or closed.")
def closed_round(stage: Stage) -> None:
    what, over = stage.prepare()
    announced = stage.announcement(over.offers[stage.setup.engine], over.units)
    stage.server.say(announced)
    mark = stage.server.log.mark()
    stage.server.say(stage.task(over, what))
    stage.quiet(mark, "no update for a task of a round that is over")
    stage.server.say(msgspec.structs.replace(announced, state="closed"))
    mark = stage.server.log.mark()
    stage.server.say(stage.task(announced, what))
    stage.quiet(mark, "no update for a task of a round that is closed")
    stage.good_round()


@ORDER.case("Stops its work on a round that closes, and sends no update for it.")
def round_closes(stage: Stage) -> None:
    stage.ensure()
    what = stage.material()
    play = stage.open(what.with_steps(steps_that_take(stage, what, 1.5)))
    stage.under_way(play, 0.4)
    stage.close(play)
    mark = stage.server.log.mark()
    stage.quiet(mark, "no update for a round that closed while it was worked on", seconds=2.0)
    stage.good_round()


@ORDER.case("Takes the server's word on whether a round is open, and not its own clock on the deadline.")
def deadline_is_advisory(stage: Stage) -> None:
    play = stage.open(
        change=lambda announced: msgspec.structs.replace(announced, deadline=time.time() - 86400)
    )
    stage.settle(play)


def _closed_round(stage: Stage) -> tuple[bytes, Play]:
    """A round that was announced and closed, without a task; its announcement, and a task for it."""
    what, announced = stage.prepare()
    payload = stage.server.say(announced)
    play = Play(announced, stage.task(announced, what), what, stage.server.log.mark())
    stage.close(play)
    return payload, play
