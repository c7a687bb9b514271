"""What the coordinator decides, carried out in its order: rounds are opened, closed and abandoned, and tasks are sent.

The order that makes ``kill -9`` harmless: journal an update, then acknowledge it; write a round's checkpoint, then
journal its end, then announce the next round; announce a round, then clear the weights of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from edgefl.errors import EdgeflError, StoreError
from edgefl.wire.mqtt.topics import NO_SHARD
from edgefl_server import events
from edgefl_server.announcer import Announcer
from edgefl_server.coordinator import fleet, states
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.states import Actions, OpenRound, Rules, State
from edgefl_server.device_news import DeviceNews
from edgefl_server.patience import CannotGoOn, Patience
from edgefl_server.pulse import Pulse
from edgefl_server.reception import Reception
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import EndedRound, Rounds
from edgefl_server.scoring import Verdicts, told_of
from edgefl_server.shards.crew import Crew
from edgefl_server.shards.slots import shard_of
from edgefl_server.storage.device_writes import DeviceWrites
from edgefl_server.storage.journal import Journal


@dataclass(eq=False, kw_only=True)
class Decisions:
    """The coordinator's ``state``, and the round that takes updates, if one does: ``active``. ``refused`` says why the run
    ended unfinished. ``emit`` tells people; ``quiet`` says whether no message waits."""

    rounds: Rounds
    journal: Journal
    patience: Patience
    pulse: Pulse
    writes: DeviceWrites
    verdicts: Verdicts
    announcer: Announcer
    news: DeviceNews
    emit: Callable[[events.Event], None]
    quiet: Callable[[], bool]
    clock: Callable[[], float]
    active: RoundAggregation | None = field(default=None, init=False)
    refused: EdgeflError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._rules = self.rounds.rules
        self._persist = self.patience.persist
        self.state = coordinator.initial(self.rounds.model.version, self.clock())

    def begin(self, state: State, reception: Reception, crew: Crew) -> None:
        """Go on from ``state``, also with a round that a killed process left open. ``reception`` and ``crew`` take updates;
        what workers took they add themselves."""
        self.state, self._reception, self._crew = state, reception, crew
        if (opened := state.round) is None:
            return
        self.journal.take_again(self._rules.run)
        self.active = self.rounds.taking(opened)
        reception.intake.replay(self.active, {NO_SHARD} if crew.there else None)
        crew.begin(opened, self.active)

    def set_rules(self, rules: Rules) -> None:
        """Take ``rules`` from now on; they differ in the memory that tiers ask for alone."""
        self._rules = self._reception.rules = rules

    def advance(self, event: states.Event, hello: bytes | None = None) -> None:
        """The coordinator's next step, and all that follows from it. ``hello``: as a device said it, for the journal."""
        if waited := self.patience.take_waited():  # for the disk, and nobody could be answered
            self.advance(states.Outage(waited))
        now = self.clock()
        about_device = isinstance(event, states.DeviceHello | states.DeviceStatus)
        settle = self.pulse.settles(now, at_once=not about_device or self.quiet())
        if settle and not isinstance(event, states.Answers):
            self._reception.commit()  # what came before counts before: a round may close now
        before = self.state
        self.state, actions = coordinator.step(self._rules, before, event, now, settle=settle)
        if isinstance(event, states.DeviceHello | states.DeviceStatus):
            self.writes.take(before, self.state, event.device, hello)
            self.news.changed(before, self.state, event.device)
        if isinstance(event, states.Declined):
            self._crew.declined(event.device)
        try:
            self._perform(actions)
        except StoreError as error:  # a server that is started again takes the round up
            raise CannotGoOn(error.message, **error.details) from error
        if not settle:
            return
        current = self.rounds.announcements.publisher.current
        if self.state.phase == "waiting" and current is not None and current.state == "open":
            self.rounds.announce(self.state)
        self.announcer.waiting(self.state, self.clock())

    def send_task(self, opened: OpenRound, assignment: fleet.Assignment) -> None:
        """Where a worker takes the update, as soon as that knows of the round."""
        device = assignment.device
        if self._crew.has_heard(device, opened.number):
            by_turns = self.active is not None and self.active.by_turns
            shard = shard_of(device) if self._crew.there else NO_SHARD
            self.rounds.announcements.send_task(opened, assignment, ask=by_turns, shard=shard)

    def send_open_tasks(self) -> None:
        """To all who have not answered."""
        if self.state.round is not None:
            for assignment in self.state.round.with_status("open"):
                self.send_task(self.state.round, assignment)

    # -- what is to be done ----------------------------------------------------------------------------------

    def _perform(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case states.Open():
                    self._open(action.round)
                case states.SendTask() if self.state.round is not None:
                    self.send_task(self.state.round, action.assignment)
                case states.Reassign():
                    self._reassign(action)
                case states.Close():
                    done = self._end(action.round, "closed")
                    self.advance(states.ModelReady(done.model_version, done.failed, done.undone))
                case states.Abandon():
                    self._abandon(action)
                case states.Warn():
                    self.emit(events.Warned(tier="", text=action.text))
                case states.Refuse():
                    self._refuse(action.error)
                case states.Finish():
                    self.rounds.announce_end(self.state)

    def _open(self, opened: OpenRound) -> None:
        self._persist(lambda: self.writes.write(quiet=True))
        self.active = self.rounds.open(opened, self.state)
        self._crew.begin(opened, self.active)
        for task in opened.began:
            self.send_task(opened, task)
        self.announcer.opened(opened, self.state.trial)

    def _reassign(self, given: states.Reassign) -> None:
        self.rounds.reassign(given)
        self._reception.intake.cancel(task.device for task in given.over)
        if self.state.round is not None:
            for task in given.tasks:
                self.send_task(self.state.round, task)

    def _abandon(self, abandoned: states.Abandon) -> None:
        number = abandoned.round.number
        if abandoned.restart:
            self._persist(partial(self.journal.begin_again, self._rules.run, number))
        self._end(abandoned.round, "abandoned", abandoned.text)

    def _end(self, ended: OpenRound, outcome: states.Outcome, text: str = "") -> EndedRound:
        active, self.active = self.active, None
        assert active is not None  # the coordinator ends what it has opened
        ended = self._crew.end(ended, active, summed=outcome == "closed")
        self._persist(lambda: self._reception.intake.end_round(ended))
        now, announcer, verdicts = self.clock(), self.announcer, self.verdicts
        done = self.rounds.end(ended, active, outcome, text, state=self.state, keep=verdicts.pending)
        announcer.ended(self.state, ended, done.outcome, done.failed or text, now)
        if done.trial is not None:
            self.advance(states.TrialCounted(done.trial))
            announcer.tried(ended.number, done.trial)
        if done.undone:
            metrics = told_of(done.metrics or {})
            self.emit(events.RolledBack(round=ended.number, text=done.failed, **metrics))
        verdicts.judge(ended.number, done.outcome, done.known)
        return done

    def _refuse(self, error: EdgeflError) -> None:
        """End the run as it is: devices that wait for its end leave, and the journal is there for another start."""
        self.refused = error
        self.emit(events.Refused(text=error.message))
        self.rounds.announce_end(self.state)
