"""Server process: one broker session, one inbox and one event loop.

:class:`~edgefl_server.message_handler.MessageHandler` turns messages into events of the coordinator.
:class:`~edgefl_server.round_driver.RoundDriver` performs the actions that follow. The service connects both::

    Service(spec, Address("localhost", 1883), Path("out"), listener).run()
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import StoreError
from edgefl.setup.processor import processor
from edgefl.system.clock import Clock, steady_time
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.broker_limits import check_features
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
from edgefl.wire.mqtt.neighbours import NeighbourMonitor, Neighbours, NeighbourSearch
from edgefl.wire.mqtt.session import Session, make_inbox
from edgefl.wire.mqtt.topics import ALL_ROUNDS, ALL_STATUSES, Topics
from edgefl_server import events
from edgefl_server.coordinator import states
from edgefl_server.coordinator.states import State
from edgefl_server.evaluator import EvaluationResult, Evaluator
from edgefl_server.identity.authenticator import Authenticator
from edgefl_server.identity.registry import Registry
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.message_handler import HandlerResult, MessageHandler
from edgefl_server.operations import LatencyProbe, Mailbox, OrderExecutor, OrderWatcher, QueuedOrder
from edgefl_server.publish.announcements import Announcements
from edgefl_server.publish.publisher import AnnouncementMonitor
from edgefl_server.reporter import EventReporter
from edgefl_server.round_driver import RoundDriver, RunContext
from edgefl_server.run_spec import RunSpec
from edgefl_server.shards.messages import FromWorker
from edgefl_server.shards.pool import WorkerOptions, WorkerPool
from edgefl_server.shards.worker import WorkerSettings
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.retry import RetryingJournal, RetryPolicy
from edgefl_server.storage.update_storage import journal_at, place_of, store_at
from edgefl_server.tick_scheduler import TickScheduler
from edgefl_server.updates.rate_limit import RateLimiter
from edgefl_server.updates.receiver import Reply, UpdateReceiver
from edgefl_server.updates.retained import RetainedMessageCleaner
from edgefl_server.updates.upload_scheduler import UploadScheduler

_MAX_WAIT_S = 60.0
_DELIVERY_S = 5.0
"""Seconds at the end of a run for the broker to confirm the last messages."""
_TIMERS_S = 0.05
"""Seconds between two looks at the timers while messages come in quick succession."""


@dataclass(frozen=True)
class StopRequested:
    """Item of the inbox that ends the service's loop. The run can be resumed by another process."""


InboxEvent = Event | FromWorker | EvaluationResult | Neighbours | QueuedOrder | LatencyProbe | StopRequested


@dataclass(frozen=True)
class _StoredCounter:
    """Storage for the counter of the server's signed messages, in the server's registry of keys, so that numbers never
    repeat.
    """

    registry: Registry

    def number(self) -> int:
        return self.registry.number()

    def keep_number(self, number: int) -> None:
        with suppress(StoreError):  # the clock stays ahead of a number that a full disk did not store
            self.registry.keep_number(number)


@dataclass(frozen=True)
class ServerKeys:
    """Key of a server, and the registry of devices that may take part.

    Attributes:
        signer: Key that signs the server's messages. None: ``signing.key`` in the folder of the run.
        enrolled: File with the registry of the devices that may take part. None: the first key of each name is
            trusted, and stored in ``devices.sqlite`` of the folder of the run.
    """

    signer: Signer | None = None
    enrolled: Path | None = None


class Service:
    """Server of a federation: receives devices' messages, and drives the rounds of a run (:meth:`run`).

    A full disk does not end it: what is not written is not acknowledged, and a round ends once there is room.

    Args:
        spec: Specification of the run.
        address: Address of the broker.
        out: Folder of the run.
        listener: Receives the events for people.
        database: SQLAlchemy URL of the journal. Default: ``journal.sqlite`` in ``out``.
        device: Processor that sums updates: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        keys: Key of the server, and list of the devices.
        workers: Workers that receive the updates.
        clock: Epoch seconds, never set back.
        evaluate: True to add one evaluation round to a finished run.

    Attributes:
        driver: Driver of the rounds.
        is_resumed: True if an earlier process began the run.

    Raises:
        ConfigError: If the settings do not fit each other, or the folder holds a run with another configuration.
        StoreError: If the folder, the journal or the registry cannot be used.
    """

    def __init__(
        self,
        spec: RunSpec,
        address: Address,
        out: Path,
        listener: events.EventListener,
        *,
        database: str = "",
        device: str = "auto",
        keys: ServerKeys | None = None,
        workers: WorkerOptions | None = None,
        clock: Clock = steady_time,
        evaluate: bool = False,
    ) -> None:
        workers, keys = workers or WorkerOptions(), keys or ServerKeys()
        workers.check(spec)
        self._address, self._device, self._clock = address, device, clock
        self._signer = keys.signer or Signer(out / "signing.key")
        self._inbox: Inbox[InboxEvent] = make_inbox(spec.limits)
        self._checkpoints = Checkpoints(out)  # first, because it creates the folder
        database = database or journal_at(out.resolve() / "journal.sqlite")
        updates = place_of(workers.updates, spec.federation, out.resolve())
        self._journal = _open_journal(spec, database, updates)
        self._context = RunContext.find(self._journal, spec, device, clock, evaluate=evaluate)
        self._spec, self.is_resumed = self._context.spec, self._context.resumed
        self._rules = self._spec.rules
        self._registry = Registry(keys.enrolled or out / "devices.sqlite", spec.federation)
        self._connect()
        memory_plans = MemoryPlans(out, spec.planned_bytes)
        self._reporter = EventReporter(self._spec, listener, memory_plans, clock)
        self._policy = RetryPolicy(spec.limits.retry_pause_s, self._reporter)
        enrols, number = keys.enrolled is not None, workers.workers or 1
        settings = WorkerSettings(
            0, number, spec.federation, self._rules, spec.limits, address, database, updates, enrols
        )
        self._build(settings, workers, out, memory_plans)
        state = self._handler.admit_known(self.driver.journaled_state(held=self._operator.holds))
        self.driver.resume(state)
        if state.round is not None and not self._pool.has_workers:
            # Devices may have their tasks from a server with workers, and send to topics of shards.
            self._session.subscribe([self._topics.all_shards])

    def _connect(self) -> None:
        """Create the broker session and the objects that use it. :meth:`run` starts the session."""
        spec, address, secret = self._spec, self._address, self._signer.keys.client_secret
        self._topics = Topics(spec.federation)
        counter = MessageCounter(_StoredCounter(self._registry), self._clock())
        self._message_signer = MessageSigner(self._signer.keys, counter)
        name = client_id(secret, "server", spec.federation, style=address.client_ids)
        self._session = Session(address, name, limits=spec.limits, events=self._inbox)
        name = client_id(secret, "look-server", spec.federation, style=address.client_ids)
        search = NeighbourSearch(address, name, (ALL_ROUNDS, ALL_STATUSES), spec.limits)
        self._neighbours = NeighbourMonitor(search, self._inbox, spec.limits.notice_s)
        self._cleaner = RetainedMessageCleaner(self._session, self._topics)
        self._probe_id = client_id(secret, "probe-server", spec.federation, style=address.client_ids)
        self._is_probed = False
        self._offline_since: float | None = self._clock()
        self._last_delivery = Delivery(None)

    def _build(
        self, settings: WorkerSettings, workers: WorkerOptions, out: Path, memory_plans: MemoryPlans
    ) -> None:
        """Create the objects of the server that need its reporter: message handler, driver of rounds, worker pool.

        ``settings`` apply to all workers, without a worker's number; ``out`` is the folder of the run.
        """
        spec, reporter, clock = self._spec, self._reporter, self._clock
        checkpoints = self._checkpoints
        announcements = Announcements(
            spec,
            self._rules.run,
            self._session,
            checkpoints.model.parent,
            sign=self._signer.sign,
            seal=self._message_signer.seal,
        )
        self._publisher = announcements.publisher
        self._watch = AnnouncementMonitor(self._publisher, self._signer.keys.public, reporter, clock)
        journal = RetryingJournal(self._journal, self._policy)
        self._evaluator = Evaluator(spec, journal, checkpoints, self._inbox, reporter)
        rate_limiter = RateLimiter(spec.limits)
        scheduler = UploadScheduler(spec.limits.asked_bytes, clock)
        self._receiver = UpdateReceiver(
            self._rules, self._journal, spec.limits, reporter, rate_limiter, scheduler
        )
        self._pool = WorkerPool(
            settings, workers.launcher, journal, self._registry, reporter, self._inbox, clock
        )
        authenticator = Authenticator(self._registry, reporter, enrolled=settings.enrolled, clock=clock)
        self._handler = MessageHandler(
            spec,
            self._journal,
            self._receiver,
            rate_limiter,
            authenticator,
            reporter,
            self._watch,
            memory_plans,
        )
        self.driver = RoundDriver(
            self._context,
            journal,
            checkpoints,
            announcements,
            self._receiver,
            self._pool,
            self._evaluator,
            reporter,
            memory_plans,
        )
        mailbox = Mailbox(out)
        self._operator = OrderExecutor(mailbox, self, self.driver, reporter)
        self._watcher = OrderWatcher(mailbox, self._inbox)
        self._ticks = TickScheduler(self._rules)
        self._timers_at = 0.0
        self._is_stopped = False

    @property
    def state(self) -> State:
        """State of the coordinator."""
        return self.driver.state

    @property
    def refused(self) -> Counter[str]:
        """Numbers of messages that were not read, stored or answered, by reason."""
        counts = Counter({**self._handler.refused, "inbox full": self._inbox.dropped})
        return counts + self._pool.refused

    @property
    def held_bytes(self) -> int:
        """Memory of unfinished updates in bytes."""
        return self._receiver.held_bytes

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until all rounds are over, or until :meth:`stop`. Everything is closed at the end.

        Raises:
            ParticipationError: If the run ends early because needed devices are missing, or because no round trained
                the model.
            DivergedError: If training diverged on the devices.
            BrokerError: If a message exceeds a limit of the broker, or the broker lacks a feature.
            ActionFailed: If the storage fails while the server stops. Another process can resume the run.
        """
        try:
            self._reporter.report_start(
                self.state,
                resumed=self.is_resumed,
                device=processor(self._device),
                server_key=self._signer.public_key,
            )
            self._session.subscribe(self._topics.server_filters)
            self._cleaner.subscribe(shards=not self._pool.has_workers)
            self.driver.announce()
            self._reporter.check_announcement(self._publisher.current)
            self._watcher.start()
            self._session.start()
            self._evaluator.resume()
            self._reporter.report_waiting(self.state)
            while self._is_running and not self._is_over():
                self.step()
            if self._is_running:
                self._finish()
        finally:
            self._evaluator.stop()
            self._watcher.stop()
            self._pool.stop()
            self._session.stop()
            self._publisher.close()
            self.close()

    def close(self) -> None:
        """Close the journal and the registry. :meth:`run` does it itself, so this is for a service that was not run."""
        self._journal.close()
        self._registry.close()

    def stop(self) -> None:
        """End :meth:`run` soon. May be called from any thread and from a signal handler."""
        self._policy.stop()
        self._inbox.put(StopRequested())

    def halt(self) -> None:
        """End :meth:`run` after the current step, and report that. Must be called on the thread of :meth:`run`."""
        self._is_stopped = True
        self._reporter.emit(events.Stopped(next_round=self.state.next_round, rounds=self._rules.last_round))

    @property
    def is_online(self) -> bool:
        """True while the broker is connected."""
        return self._offline_since is None

    @property
    def _is_running(self) -> bool:
        return not self._is_stopped and self._reporter.is_open

    def _is_over(self) -> bool:
        is_announced = self.is_online and not self._publisher.asking
        return self.state.phase == "done" and not self._evaluator.pending and is_announced

    def step(self) -> None:
        """Do the work that is due, then wait for one event of the inbox and handle it. Called in a loop by
        :meth:`run`.
        """
        if self._receiver.due_in(self.state) == 0.0:
            self._flush()
            self._request_uploads()
        self._operator.step(judged=self.is_online and not self._evaluator.pending)

        # No deadline passes while devices cannot reach the server, or while some updates cannot be received.
        now, quiet = self._clock(), self._inbox.empty()
        has_time = self.is_online and not self._pool.is_stalled
        if has_time and self._ticks.is_due(self.state, now, quiet=quiet):
            self.dispatch(states.Tick())
            return
        self.driver.write_devices(quiet=quiet)
        self.driver.release_memory(quiet=quiet)

        # The timers are not looked at for each message of a burst.
        timeout = 0.0
        if quiet or time.monotonic() - self._timers_at >= _TIMERS_S:
            self._timers_at = time.monotonic()
            timeout = self._run_timers()
        try:
            event = self._inbox.get(timeout=timeout)
        except queue.Empty:
            has_time = self.is_online and not self._pool.is_stalled
            if has_time and not self._receiver.has_batch:
                self.dispatch(states.Tick())
            return
        self.handle(event)

    def handle(self, event: InboxEvent) -> None:
        """Handle one event of the inbox.

        Raises:
            BrokerError: If a message exceeds a limit of the broker, or the broker lacks a feature.
        """
        check_limit(event, self._address)
        match event:
            case IncomingMessage() if event.topic == self._topics.current_round:
                self._watch.receive(event.payload, retained=event.retained)
            case IncomingMessage():
                self._handle_message(event)
            case FromWorker():
                self._apply(self._pool.handle(event, self.state))
            case Connected(resumed):
                self._handle_connection(resumed=resumed)
            case Disconnected():
                self._watch.disconnected()
                if self._offline_since is None:
                    self._offline_since = self._clock()
                self._reporter.report_offline(event)
            case Refusal():
                self._reporter.report_denied(event.topic, event.text(self._address))
            case EvaluationResult():
                self._evaluator.report(event)
            case Neighbours():
                self._reporter.report_neighbours(self.state, event)
            case QueuedOrder():
                self._operator.take(event)
            case LatencyProbe():
                self._reporter.emit(self._watcher.vitals(event, self._inbox.qsize()))
            case StopRequested():
                self.halt()

    def _handle_message(self, message: IncomingMessage) -> None:
        if message.topic == self._topics.probe:
            return
        is_erased = self._cleaner.erase(message)
        if self._pool.has_workers and self._cleaner.is_for_worker(message):
            return  # the worker itself received it, or the server removed it
        if is_erased:
            self._apply(self._handler.handle_retained(message, self.state))
            return
        handled = self._handler.handle(message, self.state, self.driver.aggregation)
        if self._receiver.due_in(self.state) == 0.0:
            self._flush()
        self._apply(handled)
        self._request_uploads()

    def _handle_connection(self, *, resumed: bool) -> None:
        """Move deadlines by the time without a broker, announce the run, and send all open tasks again.

        The first connection also tests the features of the broker. ``resumed``: the broker kept the session.
        """
        if not self._is_probed:
            self._is_probed = True
            topic, filters = self._topics.probe, self._topics.update_filters
            check_features(self._address, self._session.version, self._probe_id, topic, filters[0])
        now = self._clock()
        offline_s, self._offline_since = now - (self._offline_since or now), None
        self._reporter.report_online(str(self._address))
        self.dispatch(states.Outage(offline_s))
        self.driver.announce()
        self._watch.connected(resumed=resumed)
        self.driver.send_open_tasks()

    # -- what follows from an event --------------------------------------------------------------------------

    def dispatch(self, event: states.Event) -> None:
        """Pass an event to the coordinator, and perform the actions that follow.

        Updates that arrived before it are journaled first. In a burst of messages, a hello or status is only stored.
        """
        settle = self._ticks.settles(event, self._clock(), quiet=self._inbox.empty())
        if settle and not isinstance(event, states.Answers):
            self._flush()
        self.driver.dispatch(event, settle=settle)

    def _apply(self, handled: HandlerResult) -> None:
        self._send(handled.replies)
        for event in handled.events:
            self.dispatch(event)
        for task in handled.tasks:
            self.driver.send_task(task)

    def _flush(self) -> None:
        """Journal, add and acknowledge the buffered updates, and send their answers to the coordinator. This may close
        the round.
        """
        received = self.driver.flush()
        self._send(received.replies)
        if received.answers:
            self.dispatch(states.Answers(received.answers))

    def _request_uploads(self) -> None:
        """Send the devices that may upload now the requests for their updates."""
        if self.state.round is None:
            return
        received = self._receiver.request_uploads(self.state.round)
        self._send(received.replies)
        if received.answers:
            self.dispatch(states.Answers(received.answers))

    def _send(self, replies: tuple[Reply, ...]) -> None:
        """Send acknowledgements to devices. If one is lost, the device sends its update again and gets another."""
        for reply in replies:
            topic = self._topics.device(reply.device).acks
            payload = self._message_signer.seal(topic, reply.ack)
            self._last_delivery = self._session.publish(
                topic, payload, expires_s=self._spec.limits.round_deadline_s
            )
            self._watcher.time_delivery(self._last_delivery)

    def _run_timers(self) -> float:
        """Do the periodic work that is due. Return the seconds until the next work is due, at most 60."""
        now = self._clock()
        pool = self._pool.step(self.state, now)
        if not self.is_online:  # without a broker no device can meet a deadline
            return _MAX_WAIT_S if pool is None else pool
        wake = None if self._pool.is_stalled else self._ticks.wake_at(self.state, now)
        waits = (
            None if wake is None else wake - now,
            pool,
            self.driver.write_devices_in(),
            self._receiver.due_in(self.state),
            self._reporter.report_refused(self.refused),
            self._reporter.report_awaited(self.state),
            self._watch.step(),
            self._neighbours.step(alone=self._reporter.lacks_devices),
            self._cleaner.step(shards=not self._pool.has_workers),
        )
        return max(0.0, min([_MAX_WAIT_S, *(wait for wait in waits if wait is not None)]))

    def _finish(self) -> None:
        """Write the trained model, wait until devices are informed, and unsubscribe so that the broker queues nothing.

        Raises:
            EdgeflError: The error that ended the run early, if there is one.
        """
        error = self.driver.refusal_error
        finished = self.driver.write_model() if error is None else None
        self._publisher.wait_delivered(_DELIVERY_S)
        self._last_delivery.wait(
            _DELIVERY_S
        )  # workers may have received updates until the end of the last round
        self._session.unsubscribe(self._topics.server_filters)
        if error is not None:
            raise error
        if finished is not None:
            self._reporter.emit(finished)


def _open_journal(spec: RunSpec, database: str, updates: str) -> Journal:
    """Open the journal at the URL ``database``, which stores the updates' bytes at ``updates``."""
    return Journal(
        database,
        spec.federation,
        store_at(updates),
        keep=spec.keep_updates,
        versions=1 + spec.rules.max_staleness,
    )
