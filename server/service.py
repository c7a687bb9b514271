"""The server process: one broker session, one loop, one journal. All decisions are the coordinator's.

    Service(spec, Address("localhost", 1883), Path("out"), emit=print).run()

The order that makes ``kill -9`` harmless: journal an update, then acknowledge it; write a round's checkpoint, then
journal its end, then announce the next round; announce a round, then clear the weights of the last.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgefl.setup.processor import processor
from edgefl.system.clock import steady_time
from edgefl.wire.bundle.signatures import Signer
from edgefl.wire.errors import ParticipationError, StoreError
from edgefl.wire.mqtt import session as broker
from edgefl.wire.mqtt.client_ids import client_id
from edgefl.wire.mqtt.envelope import Sequence, Speaker
from edgefl.wire.mqtt.inbox import Inbox
from edgefl.wire.mqtt.messages import Ack
from edgefl.wire.mqtt.neighbours import Lookout, Neighbours, look
from edgefl.wire.mqtt.session import Address, Down, Incoming, Refused, Up
from edgefl.wire.mqtt.topics import ALL_ROUNDS, ALL_STATUSES, NO_SHARD, Topics
from server import events
from server.announcer import Announcer
from server.coordinator import machine as coordinator
from server.coordinator.machine import Actions, OpenRound
from server.coordinator.states import Abandon, Close, Finish, Open, Reassign, Refuse, SendTask, Warn
from server.device_news import DeviceNews
from server.device_rows import DeviceRows
from server.identity.door import Door
from server.identity.registry import Registry
from server.link import Link
from server.load_news import LoadNews
from server.operations.operations import Given, Operations, Probe
from server.patience import CannotGoOn, Patience
from server.publish.watch import Watch
from server.pulse import Chores, Pulse
from server.reception import Reception, Tellers
from server.rounds import EndedRound, Rounds
from server.run_spec import RunSpec
from server.scoring import Scored, told_of
from server.shards.crew import Around, Crew
from server.shards.hiring import ALONE, Workers
from server.shards.slots import shard_of
from server.shards.words import FromWorker
from server.storage.checkpoints import Checkpoints
from server.storage.journal import Journal
from server.storage.places import journal_at, place_of, store_at
from server.taking.active import ActiveRound
from server.verdicts import Verdicts

_LONGEST_WAIT_S, _FAREWELL_S = 60.0, 5.0


@dataclass(frozen=True)
class Stop:
    """Put into the inbox to end the loop; the run can be taken up later."""


InboxEvent = broker.Event | FromWorker | Scored | Neighbours | Given | Probe | Stop
"""What the service waits for: news of the session, of workers, evaluations and neighbours, orders, or that it is to end."""


class Service:
    """A federation's server. ``run`` returns when all rounds are done or :meth:`stop` was called.

    ParticipationError from ``run`` if a program needs every device and the run ends for want of one, or of its updates.

    ``signer`` has the key that signs all that the server says (by default ``out/signing.key``). ``enrolled`` is the list of
    the devices that are let in; without it the first key of each name is trusted, and kept in ``out/devices.sqlite``.
    ``database`` is any SQLAlchemy URL (default: ``out/journal.sqlite``); ``device`` is where updates are summed. ``crew``
    says who takes updates: processes of this machine, where it has several workers (:mod:`server.shards`). ``clock``
    gives epoch seconds, and is never set back. A disk that is full ends nothing: what was not written is not acknowledged,
    and a round ends once there is room.
    """

    def __init__(
        self,
        spec: RunSpec,
        address: Address,
        out: Path,
        *,
        emit: Callable[[events.Event], None],
        database: str = "",
        device: str = "auto",
        signer: Signer | None = None,
        enrolled: Path | None = None,
        crew: Workers = ALONE,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._spec = spec
        self._address = address
        self._listener = emit
        self._clock = clock
        self._device = device
        self._signer = signer or Signer(out / "signing.key")
        self._registry = Registry(enrolled or out / "devices.sqlite", spec.federation)
        self._speaker = Speaker(self._signer.keys, Sequence(self._registry.number, self._keep_number, clock))
        self._topics = Topics(spec.federation)
        self._checkpoints = Checkpoints(out)
        journal = database or journal_at(out.resolve() / "journal.sqlite")
        updates = place_of(crew.updates, spec.federation, out.resolve())
        self._journal = Journal(
            journal,
            spec.federation,
            store_at(updates),
            keep=spec.keep_updates,
            versions=1 + spec.rules.max_staleness,
        )
        self._inbox: Inbox[InboxEvent] = broker.inbox_of(spec.limits)
        self._load = LoadNews(spec.limits.notice_s, self._emit)
        self._patience = Patience(spec.limits.retry_pause_s, self._troubled)
        self._session = broker.Session(
            address,
            client_id("server", spec.federation, style=address.client_ids),
            limits=spec.limits,
            deliver=self._inbox.put,
        )
        self._rounds = Rounds(
            spec,
            self._journal,
            self._checkpoints,
            self._session,
            device=device,
            signer=self._signer,
            seal=self._speaker.seal,
            clock=clock,
            persist=self._patience.persist,
        )
        self._rules = self._rounds.rules
        self._verdicts = Verdicts(
            spec,
            self._rules,
            self._journal,
            self._patience.persist,
            self._emit,
            load=lambda number: spec.model_of(self._checkpoints.load(number)),
            done=self._inbox.put,
        )
        self._announcements = self._rounds.announcements
        self._publisher = self._announcements.publisher
        self._watch = Watch(self._publisher, self._signer.keys.public, self._emit, clock)
        self._rows = DeviceRows(self._journal)
        self._pulse = Pulse(self._rules)
        self._chores = Chores()
        self._link = Link(address, spec.federation, self._emit, clock)
        self._announcer = Announcer(spec, self._rules, self._emit)
        self._news = DeviceNews(self._rules, spec.limits.notice_s, self._emit)
        name = client_id("look-server", spec.federation, style=address.client_ids)
        see = partial(look, address, name, (ALL_ROUNDS, ALL_STATUSES), spec.limits)
        self._lookout = Lookout(see, self._inbox.put, spec.limits.notice_s)
        tellers = Tellers(
            answer=self._answer,
            emit=self._emit,
            troubled=self._troubled,
            news=self._news,
            announcer=self._announcer,
        )
        door = Door(self._registry, self._announcer.noted, enrolled=enrolled is not None, clock=clock)
        self._reception = Reception(
            spec,
            self._rules,
            self._journal,
            self,
            tellers,
            door=door,
            watch=self._watch,
            clock=clock,
            persist=self._patience.persist,
        )
        self._operations = Operations(out, self, self._rounds, self._inbox, self._emit)
        self._refused = ""
        self._stopped = False
        self.state = self._reception.at_start(self._rounds.initial_state(held=self._operations.holds))
        self.active: ActiveRound | None = None
        around = Around(
            course=self,
            tellers=tellers,
            keys=lambda device: tuple(self._registry.keys(device)),
            send_task=self._send_task,
            deliver=self._inbox.put,
            persist=self._patience.persist,
            clock=clock,
        )
        told = crew.told(spec, self._rules, address, journal, updates, enrolled=enrolled is not None)
        self._crew = Crew(told, self._journal, crew.hire, around)
        if self.state.round is not None:
            self._take_up(self.state.round)

    def _take_up(self, opened: OpenRound) -> None:
        """Go on with the round that a killed process left open; what workers took of it they add themselves."""
        self._journal.take_again(self._rules.run)
        self.active = self._rounds.taking(opened)
        self._reception.intake.replay(self.active, {NO_SHARD} if self._crew.there else None)
        self._crew.begin(opened, self.active)
        if not self._crew.there:  # devices may have been told of shards
            self._session.subscribe([self._topics.all_shards])

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until all rounds are over."""
        try:
            self._announcer.started(
                self.state,
                resumed=self._rounds.resumed,
                device=processor(self._device),
                server_key=self._signer.public_key,
            )
            self._session.subscribe(self._topics.server_filters)
            self._rounds.announce(self.state)
            self._announcer.announced(self._publisher.current)
            self._operations.start()
            self._session.start()
            self._verdicts.take_up()
            self._announcer.waiting(self.state, self._clock())
            while not self._stopped and not self._is_over():
                self._next()
            if not self._stopped:
                self._finish()
        finally:
            self._verdicts.stop()
            self._operations.stop()
            self._crew.stop()
            self._session.stop()
            self._publisher.close()
            self._journal.close()
            self._registry.close()

    def stop(self) -> None:
        """End :meth:`run` soon; callable from any thread and from a signal handler."""
        self._patience.end()
        self._inbox.put(Stop())

    def halt(self) -> None:
        """End :meth:`run` behind what it does now, on its own thread."""
        self._stopped = True
        self._emit(events.Stopped(next_round=self.state.next_round, rounds=self._rules.rounds))

    def _is_over(self) -> bool:
        said = self._link.is_up and not self._publisher.asking
        return self.state.phase == "done" and not self._verdicts.pending and said

    def _next(self) -> None:
        self._reception.step()
        self._operations.step(judged=self._link.is_up and not self._verdicts.pending)
        now = self._clock()
        quiet = self._inbox.empty()
        if self._link.is_up and not self._crew.in_trouble and self._pulse.due(self.state, now, quiet=quiet):
            self.advance(coordinator.Tick())
            return
        self._write_rows(quiet=quiet)
        self._rounds.tidy(quiet=quiet)
        try:
            event = self._inbox.get(timeout=self._timeout() if quiet or self._chores.due() else 0.0)
        except queue.Empty:
            if self._link.is_up and not self._reception.intake.pending and not self._crew.in_trouble:
                self.advance(coordinator.Tick())  # no deadline passes while nobody can reach us
            return
        self._handle(event)

    def _handle(self, event: InboxEvent) -> None:
        match event:
            case Incoming() if event.topic == self._topics.current_round:
                self._watch.came(event.payload, retained=event.retained)
            case Incoming():
                self._reception.take(event)
            case FromWorker():
                if (news := self._crew.heard(event)) is not None:
                    self.advance(news)
            case Up(resumed):
                self._up(resumed)
            case Down():
                self._watch.disconnected()
                self._link.down(event)
            case Refused():
                self._announcer.denied(event.topic, event.text(self._address))
            case Scored():
                self._verdicts.tell(event, heard=lambda: not self._stopped)
            case Neighbours():
                self._announcer.neighbours(self.state, event)
            case Given() | Probe():
                self._operations.take(event)
            case Stop():
                self.halt()

    def _timeout(self) -> float:
        now = self._clock()
        crew = self._crew.step(now)
        if not self._link.is_up:  # without a broker no device can meet a deadline
            return _LONGEST_WAIT_S if crew is None else crew
        wake = self._pulse.wake_at(self.state, now)
        waits = (
            None if wake is None or self._crew.in_trouble else wake - now,
            crew,
            self._rows.wait(),
            self._reception.intake.wait(self.state),
            self._limited(now),
            self._news.step(self.state, now),
            self._watch.step(),
            self._lookout.step(alone=self._announcer.lacks_devices),
        )
        return max(0.0, min([_LONGEST_WAIT_S, *(wait for wait in waits if wait is not None)]))

    def _up(self, resumed: bool) -> None:
        """Connected: whatever happened meanwhile, make the broker and the devices know where the run is."""
        self._news.reconnected()
        self.advance(coordinator.Outage(self._link.up()))
        self._rounds.announce(self.state)
        self._watch.connected(resumed=resumed)
        if self.state.round is not None:
            for assignment in self.state.round.with_status("open"):
                self._send_task(self.state.round, assignment)

    def _send_task(self, opened: OpenRound, assignment: coordinator.Assignment) -> None:
        """Where a worker takes the update, as soon as that knows of the round."""
        device = assignment.device
        if self._crew.has_heard(device, opened.number):
            by_turns = self.active is not None and self.active.by_turns
            shard = shard_of(device) if self._crew.there else NO_SHARD
            self._announcements.send_task(opened, assignment, ask=by_turns, shard=shard)

    def _answer(self, device: str, ack: Ack) -> None:
        # A device that does not get it sends again, and is answered again.
        topic, expires_s = self._topics.device(device).acks, self._spec.limits.round_deadline_s
        sealed = self._speaker.seal(topic, ack)
        self._operations.sent(self._session.publish(topic, sealed, expires_s=expires_s))

    # -- what the coordinator decides ------------------------------------------------------------------------

    def advance(self, event: coordinator.Event, hello: bytes | None = None) -> None:
        """The coordinator's next step, and all that follows from it. ``hello``: as a device said it, for the journal."""
        if waited := self._patience.take_waited():  # for the disk, and nobody could be answered
            self.advance(coordinator.Outage(waited))
        now = self._clock()
        about_device = isinstance(event, coordinator.DeviceHello | coordinator.DeviceStatus)
        settle = self._pulse.settles(now, at_once=not about_device or self._inbox.empty())
        if settle and not isinstance(event, coordinator.Answers):
            self._reception.commit()  # what came before counts before: a round may close now
        before = self.state
        self.state, actions = coordinator.step(self._rules, before, event, now, settle=settle)
        if isinstance(event, coordinator.DeviceHello | coordinator.DeviceStatus):
            self._rows.take(before, self.state, event.device, hello)
            self._news.changed(before, self.state, event.device)
        if isinstance(event, coordinator.Declined):
            self._crew.declined(event.device)
        try:
            self._perform(actions)
        except StoreError as error:  # a server that is started again takes the round up
            raise CannotGoOn(error.message, **error.details) from error
        if not settle:
            return
        current = self._publisher.current
        if self.state.phase == "waiting" and current is not None and current.state == "open":
            self._rounds.announce(self.state)
        self._announcer.waiting(self.state, self._clock())

    def _write_rows(self, *, quiet: bool) -> None:
        """Journal what is new of devices: at once while it is quiet, else now and then, many of them in one step."""
        try:
            self._rows.write(quiet=quiet)
        except StoreError as error:
            self._troubled(error)

    def _perform(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Open():
                    self._patience.persist(lambda: self._rows.write(quiet=True))
                    self.active = self._rounds.open(action.round, self.state)
                    self._crew.begin(action.round, self.active)
                    for task in action.round.began:
                        self._send_task(action.round, task)
                    self._announcer.opened(action.round, self.state.trial)
                case SendTask() if self.state.round is not None:
                    self._send_task(self.state.round, action.assignment)
                case Reassign():
                    self._reassign(action)
                case Close():
                    done = self._end(action.round, "closed")
                    self.advance(coordinator.ModelReady(done.model_version, done.failed, done.undone))
                case Abandon():
                    if action.restart:
                        number = action.round.number
                        self._patience.persist(partial(self._journal.begin_again, self._rules.run, number))
                    self._end(action.round, "abandoned", action.text)
                case Warn():
                    self._emit(events.Warned(tier="", text=action.text))
                case Refuse():
                    self._refuse(action.text)
                case Finish():
                    self._rounds.announce_end(self.state)

    def _reassign(self, given: Reassign) -> None:
        self._rounds.reassign(given)
        self._reception.intake.reassigned(task.device for task in given.over)
        if self.state.round is not None:
            for task in given.tasks:
                self._send_task(self.state.round, task)

    def _end(self, ended: OpenRound, outcome: coordinator.Outcome, text: str = "") -> EndedRound:
        active, self.active = self.active, None
        assert active is not None  # the coordinator ends what it has opened
        ended = self._crew.end(ended, active, summed=outcome == "closed")
        self._patience.persist(lambda: self._reception.intake.end_round(ended))
        now = self._clock()
        done = self._rounds.end(ended, active, outcome, text, state=self.state, keep=self._verdicts.pending)
        self._announcer.ended(self.state, ended, done.outcome, done.failed or text, now)
        if done.trial is not None:
            self.advance(coordinator.TrialCounted(done.trial))
            self._announcer.tried(ended.number, done.trial)
        if done.undone:
            self._emit(events.RolledBack(round=ended.number, text=done.failed, **told_of(done.metrics or {})))
        self._verdicts.judge(ended.number, done.outcome, done.known)
        return done

    def _refuse(self, text: str) -> None:
        """End the run as it is: devices that wait for its end leave, and the journal is there for another start."""
        self._refused = text
        self._emit(events.Refused(text=text))
        self._rounds.announce_end(self.state)

    def _finish(self) -> None:
        """Write the model if it is trained, make sure the devices know, and leave nothing queued for us at the broker."""
        finished = None if self._refused else self._rounds.finish()
        self._publisher.wait_delivered(_FAREWELL_S)
        self._session.unsubscribe(self._topics.server_filters)
        if finished is None:
            raise ParticipationError(self._refused)
        self._emit(finished)

    # -- telling people --------------------------------------------------------------------------------------

    def _limited(self, now: float) -> float | None:
        """Tell what was turned away, if it is time. Seconds until it is next; None if there is nothing to tell."""
        here = {**self._reception.turned_away, "inbox full": self._inbox.dropped}
        counts = Counter(here) + Counter(self._crew.turned_away)
        return self._load.step({why: count for why, count in counts.items() if count}, now)

    def _troubled(self, error: StoreError) -> None:
        self._load.troubled(error, self._clock())

    def _keep_number(self, number: int) -> None:
        with suppress(StoreError):  # the clock stays ahead of what a full disk did not keep
            self._registry.keep_number(number)

    def _emit(self, event: events.Event) -> None:
        """Tell; a listener that fails costs its own news only, one that has gone away ends the service."""
        try:
            self._listener(event)
        except BrokenPipeError:
            self._stopped = True
        except Exception:
            return  # its own fault, and there is nobody else to tell
