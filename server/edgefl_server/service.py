"""The server process: one broker session, one loop, one journal. All decisions are the coordinator's
(:mod:`edgefl_server.decisions` carries them out).

    Service(spec, Address("localhost", 1883), Path("out"), emit=print).run()
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.errors import StoreError
from edgefl.setup.processor import processor
from edgefl.system.clock import steady_time
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.mqtt import session as broker
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.envelope import MessageCounter, MessageSigner
from edgefl.wire.mqtt.events import (
    Connected,
    Disconnected,
    Event,
    Inbox,
    IncomingMessage,
    Refusal,
    check_limit,
)
from edgefl.wire.mqtt.messages import Ack
from edgefl.wire.mqtt.neighbours import NeighbourMonitor, Neighbours, NeighbourSearch
from edgefl.wire.mqtt.topics import ALL_ROUNDS, ALL_STATUSES, Topics
from edgefl_server import events
from edgefl_server.announcer import Announcer
from edgefl_server.coordinator import states
from edgefl_server.coordinator.states import State
from edgefl_server.decisions import Decisions
from edgefl_server.device_news import DeviceNews, LoadNews
from edgefl_server.identity.door import Door
from edgefl_server.identity.registry import Registry
from edgefl_server.link import Link
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.operations.operations import Given, Operations, Probe
from edgefl_server.patience import Patience
from edgefl_server.publish.watch import Watch
from edgefl_server.pulse import Chores, Pulse
from edgefl_server.reception import Reception, Tellers
from edgefl_server.rounds import Rounds
from edgefl_server.run_spec import RunSpec
from edgefl_server.scoring import Scored, Verdicts
from edgefl_server.shards.crew import Around, Crew
from edgefl_server.shards.hiring import ALONE, Workers
from edgefl_server.shards.messages import FromWorker
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.device_writes import DeviceWrites
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.places import journal_at, place_of, store_at
from edgefl_server.updates.retained import RetainedMessageCleaner

_LONGEST_WAIT_S, _FAREWELL_S = 60.0, 5.0


@dataclass(frozen=True)
class Stop:
    """Put into the inbox to end the loop; the run can be taken up later."""


InboxEvent = Event | FromWorker | Scored | Neighbours | Given | Probe | Stop
"""What the service waits for: news of the session, of workers, evaluations and neighbours, orders, or that it is to end."""


@dataclass(frozen=True)
class _KeyNumbers:
    """Numbers of the server's messages, in its registry."""

    registry: Registry

    def number(self) -> int:
        return self.registry.number()

    def keep_number(self, number: int) -> None:
        with suppress(StoreError):  # the clock stays ahead of what a full disk did not keep
            self.registry.keep_number(number)


class Service:
    """A federation's server. ``run`` returns when all rounds are done or :meth:`stop` was called.

    ParticipationError from ``run`` if an algorithm needs every device and the run ends for want of one, or of its updates.

    ``signer`` has the key that signs all that the server says (by default ``out/signing.key``). ``enrolled`` is the list of
    the devices that are let in; without it the first key of each name is trusted, and kept in ``out/devices.sqlite``.
    ``database`` is any SQLAlchemy URL (default: ``out/journal.sqlite``); ``device`` is where updates are summed. ``crew``
    says who takes updates: processes of this machine, where it has several workers (:mod:`edgefl_server.shards`). ``clock``
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
        self._plans = MemoryPlans(out, spec.planned_bytes)
        spec = replace(spec, rules=self._plans.asked(spec.rules))
        self._spec = spec
        self._address = address
        self._listener = emit
        self._clock = clock
        self._device = device
        self._signer = signer or Signer(out / "signing.key")
        self._secret = self._signer.keys.client_secret
        self._registry = Registry(enrolled or out / "devices.sqlite", spec.federation)
        self._speaker = MessageSigner(self._signer.keys, MessageCounter(_KeyNumbers(self._registry), clock()))
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
            client_id(self._secret, "server", spec.federation, style=address.client_ids),
            limits=spec.limits,
            events=self._inbox,
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
        self._publisher = self._rounds.announcements.publisher
        self._watch = Watch(self._publisher, self._signer.keys.public, self._emit, clock)
        self._writes = DeviceWrites(self._journal)
        self._pulse = Pulse(self._rules)
        self._chores = Chores()
        self._link = Link(address, spec.federation, self._emit, clock)
        self._announcer = Announcer(spec, self._rules, self._emit)
        self._news = DeviceNews(self._rules, spec.limits.notice_s, self._emit)
        name = client_id(self._secret, "look-server", spec.federation, style=address.client_ids)
        search = NeighbourSearch(address, name, (ALL_ROUNDS, ALL_STATUSES), spec.limits)
        self._lookout = NeighbourMonitor(search, self._inbox, spec.limits.notice_s)
        self._leftovers = RetainedMessageCleaner(self._session, self._topics)
        tellers = Tellers(
            answer=self._answer,
            emit=self._emit,
            troubled=self._troubled,
            news=self._news,
            announcer=self._announcer,
        )
        self._decisions = Decisions(
            rounds=self._rounds,
            journal=self._journal,
            patience=self._patience,
            pulse=self._pulse,
            writes=self._writes,
            verdicts=self._verdicts,
            announcer=self._announcer,
            news=self._news,
            emit=self._emit,
            quiet=self._inbox.empty,
            clock=clock,
        )
        door = Door(self._registry, self._announcer.noted, enrolled=enrolled is not None, clock=clock)
        self._reception = Reception(
            spec,
            self._rules,
            self._journal,
            self._decisions,
            tellers,
            door=door,
            watch=self._watch,
            clock=clock,
            persist=self._patience.persist,
        )
        self._operations = Operations(out, self, self._rounds, self._inbox, self._emit)
        self._stopped = False
        self._last_answer = Delivery(None)
        around = Around(
            course=self._decisions,
            tellers=tellers,
            keys=lambda device: tuple(self._patience.persist(lambda: self._registry.keys(device))),
            send_task=self._decisions.send_task,
            deliver=self._inbox.put,
            persist=self._patience.persist,
            clock=clock,
        )
        told = crew.told(spec, self._rules, address, journal, updates, enrolled=enrolled is not None)
        self._crew = Crew(told, self._journal, crew.hire, around)
        state = self._reception.at_start(self._rounds.initial_state(held=self._operations.holds))
        self._decisions.begin(state, self._reception, self._crew)
        if state.round is not None and not self._crew.there:  # devices may have been told of shards
            self._session.subscribe([self._topics.all_shards])

    @property
    def state(self) -> State:
        return self._decisions.state

    @state.setter
    def state(self, state: State) -> None:
        self._decisions.state = state

    def advance(self, event: states.Event) -> None:
        """The coordinator's next step, and all that follows from it."""
        self._decisions.advance(event)

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
            self._leftovers.subscribe(shards=not self._crew.there)
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
            self.advance(states.Tick())
            return
        self._write_devices(quiet=quiet)
        self._rounds.tidy(quiet=quiet)
        try:
            event = self._inbox.get(timeout=self._timeout() if quiet or self._chores.due() else 0.0)
        except queue.Empty:
            if self._link.is_up and not self._reception.intake.has_batch and not self._crew.in_trouble:
                self.advance(states.Tick())  # no deadline passes while nobody can reach us
            return
        self._handle(event)

    def _handle(self, event: InboxEvent) -> None:
        check_limit(event, self._address)
        match event:
            case IncomingMessage() if event.topic == self._topics.current_round:
                self._watch.came(event.payload, retained=event.retained)
            case IncomingMessage():
                self._came(event)
            case FromWorker():
                if (news := self._crew.heard(event)) is not None:
                    self.advance(news)
            case Connected(resumed):
                self._up(resumed)
            case Disconnected():
                self._watch.disconnected()
                self._link.down(event)
            case Refusal():
                self._announcer.denied(event.topic, event.text(self._address))
            case Scored():
                self._verdicts.tell(event, heard=lambda: not self._stopped)
            case Neighbours():
                self._announcer.neighbours(self.state, event)
            case Given() | Probe():
                self._operations.take(event)
            case Stop():
                self.halt()

    def _came(self, message: IncomingMessage) -> None:
        erased = self._leftovers.erase(message)
        if self._crew.there and self._leftovers.is_for_worker(message):
            return  # what a worker heard live is not known here
        if erased:
            self._reception.littered(message)
        else:
            self._reception.take(message)

    def _timeout(self) -> float:
        now = self._clock()
        crew = self._crew.step(now)
        if not self._link.is_up:  # without a broker no device can meet a deadline
            return _LONGEST_WAIT_S if crew is None else crew
        wake = self._pulse.wake_at(self.state, now)
        waits = (
            None if wake is None or self._crew.in_trouble else wake - now,
            crew,
            self._writes.wait(),
            self._reception.intake.due_in(self.state),
            self._limited(now),
            self._news.step(self.state, now),
            self._watch.step(),
            self._lookout.step(alone=self._announcer.lacks_devices),
            self._leftovers.step(shards=not self._crew.there),
        )
        return max(0.0, min([_LONGEST_WAIT_S, *(wait for wait in waits if wait is not None)]))

    def _up(self, resumed: bool) -> None:
        """Connected: whatever happened meanwhile, make the broker and the devices know where the run is."""
        self._news.reconnected()
        self.advance(states.Outage(self._link.up()))
        self._rounds.announce(self.state)
        self._watch.connected(resumed=resumed)
        self._decisions.send_open_tasks()

    def _answer(self, device: str, ack: Ack) -> None:
        # A device that does not get it sends again, and is answered again.
        topic, expires_s = self._topics.device(device).acks, self._spec.limits.round_deadline_s
        self._last_answer = self._session.publish(topic, self._speaker.seal(topic, ack), expires_s=expires_s)
        self._operations.sent(self._last_answer)

    def _write_devices(self, *, quiet: bool) -> None:
        """Journal what is new of devices: at once while it is quiet, else now and then, many of them in one step."""
        try:
            self._writes.write(quiet=quiet)
        except StoreError as error:
            self._troubled(error)

    def _finish(self) -> None:
        """Write the model if it is trained, make sure the devices know, and leave nothing queued for us at the broker."""
        refused = self._decisions.refused
        finished = self._rounds.finish() if refused is None else None
        self._publisher.wait_delivered(_FAREWELL_S)
        self._last_answer.wait(_FAREWELL_S)  # workers may have taken updates until the end of the last round
        self._session.unsubscribe(self._topics.server_filters)
        if refused is not None:
            raise refused
        if finished is not None:
            self._emit(finished)

    # -- telling people --------------------------------------------------------------------------------------

    def _limited(self, now: float) -> float | None:
        """Tell what was turned away, if it is time. Seconds until it is next; None if there is nothing to tell."""
        counts = Counter({**self._reception.turned_away, "inbox full": self._inbox.dropped})
        counts += Counter(self._crew.turned_away)
        return self._load.step({why: count for why, count in counts.items() if count}, now)

    def _troubled(self, error: StoreError) -> None:
        self._load.troubled(error, self._clock())

    def _compare_memory(self, event: events.DeviceSeen) -> None:
        """Raise or lower the memory that the device's tier asks for."""
        warned = self._plans.report(event)
        self._decisions.set_rules(self._plans.asked(self._rules))
        if warned is not None:
            self._listener(warned)

    def _emit(self, event: events.Event) -> None:
        """Tell; a listener that fails costs its own news only, one that has gone away ends the service."""
        try:
            self._listener(event)
            if isinstance(event, events.DeviceSeen) and event.stage == events.REPORTED:
                self._compare_memory(event)
        except BrokenPipeError:
            self._stopped = True
        except Exception:
            return  # its own fault, and there is nobody else to tell
