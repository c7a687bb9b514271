"""Aggregation worker: receives the updates of its shards and returns their sum at the end of a round.

A worker has its own broker session, which only receives. Acknowledgements are sent by the server, whose key signs
them. An update is journaled before the server receives its result. So a worker may be killed at any time, and its
successor finds all accepted updates in the journal.
"""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from edgefl.errors import IdentityError, ProtocolError, StoreError
from edgefl.system.clock import Clock, steady_time
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.connection import AS_PUBLISHED
from edgefl.wire.mqtt.envelope import unwrap, verify_envelope
from edgefl.wire.mqtt.events import Connected, EventSink, Inbox, IncomingMessage
from edgefl.wire.mqtt.messages import UpdateChunk, decode
from edgefl.wire.mqtt.session import Session, make_inbox
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl.wire.text import printable
from edgefl_server.coordinator.fleet import Devices, Status
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import Answered, Rules, State, TurnLost
from edgefl_server.events import Event, Rejected
from edgefl_server.identity.authenticator import check_valid, unknown_key, unsigned_error
from edgefl_server.identity.registry import DeviceKey
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.shards import messages
from edgefl_server.shards.messages import shard_of, shards_of
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.retry import RetryPolicy
from edgefl_server.storage.update_storage import store_at
from edgefl_server.updates.rate_limit import RateLimiter
from edgefl_server.updates.receiver import MAX_ROUNDS, ReceiveResult, Reply, UpdateReceiver
from edgefl_server.updates.upload_scheduler import UploadScheduler
from edgefl_server.workers.protocol import Stop

_MAX_WAIT_S = 1.0
_SUBSCRIBED_S = 0.01
"""Seconds between two looks whether the broker has confirmed the subscriptions."""


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one aggregation worker, which it receives when it is started.

    Attributes:
        worker: Number of this worker, from 0.
        workers: Number of workers.
        federation: Name of the federation.
        rules: Rules of the run.
        limits: The worker's share of the federation's limits.
        address: Address of the broker.
        database: URL of the journal.
        updates: Folder or fsspec URL of the updates' bytes.
        enrolled: True if devices have to be on a list.
    """

    worker: int
    workers: int
    federation: str
    rules: Rules
    limits: Limits
    address: Address
    database: str
    updates: str
    enrolled: bool

    def build(self, sink: EventSink[messages.WorkerMessage]) -> AggregationWorker:
        """Return the worker with these settings, which sends its messages to ``sink``. It runs when its ``run`` is
        called.
        """
        return AggregationWorker(self, sink)


class UnknownDevice(IdentityError):
    """Error: a device sent a message, and this worker has no keys of it. The server sends them on request."""


class KeyRing:
    """Keys of the devices that the server sent to a worker, and the verification of chunks with them.

    Args:
        enrolled: True if devices have to be on a list.
        clock: Epoch seconds.
    """

    def __init__(self, *, enrolled: bool, clock: Clock) -> None:
        self._enrolled = enrolled
        self._clock = clock
        self.keys: dict[str, tuple[DeviceKey, ...]] = {}

    def update(self, keys: Mapping[str, tuple[DeviceKey, ...] | None]) -> None:
        """Replace the keys of devices; None removes a device, whose messages then raise UnknownDevice."""
        for device, each in keys.items():
            if each is None:
                self.keys.pop(device, None)
            else:
                self.keys[device] = each

    def open(self, device: str, topic: str, payload: bytes) -> UpdateChunk:
        """Verify the signature of a chunk of an update, and return the decoded chunk.

        Args:
            device: Name in the topic.
            topic: Topic of the message, which is part of what was signed.
            payload: The envelope, or the bare chunk of a device that does not sign.

        Raises:
            UnknownDevice: If the server has sent no keys of the device.
            IdentityError: If the device did not sign the message.
            ProtocolError: If the message is malformed.
        """
        keys = self.keys.get(device)
        if keys is None:
            raise UnknownDevice(
                "unknown-device", f"device {device} sent no hello; connect again", device=device
            )
        envelope = unwrap(payload, UpdateChunk)
        if envelope is None:
            if self._enrolled or keys:
                raise unsigned_error(UpdateChunk, device, enrolled=self._enrolled)
            return decode(UpdateChunk, payload)
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and (self._enrolled or keys):
            raise unknown_key(device, envelope, keys)
        if known is not None:
            check_valid(device, known, self._clock())
        return verify_envelope(UpdateChunk, topic, envelope)


@dataclass(frozen=True)
class _CommandQueued:
    """Item of the inbox that wakes the worker to handle its commands."""


class AggregationWorker:
    """Worker that receives the updates of its shards of devices, journals them, and returns their sum after each
    round.

    Args:
        settings: Settings of this worker.
        sink: Receives the messages for the server, on the thread of :meth:`run`.
        clock: Epoch seconds, never set back.
    """

    stop_s = 5.0
    """Seconds to leave the broker. What is not journaled then is sent again by the devices."""

    def __init__(
        self, settings: WorkerSettings, sink: EventSink[messages.WorkerMessage], clock: Clock = steady_time
    ) -> None:
        self._settings = settings
        self._sink = sink
        self._clock = clock
        self._shards = shards_of(settings.worker, settings.workers)
        self._topics = Topics(settings.federation)
        self._commands: deque[messages.Command] = deque()
        self._inbox: Inbox[object] = make_inbox(settings.limits)
        name = f"{settings.worker}-{settings.workers}"
        style = settings.address.client_ids
        self._session = Session(
            settings.address,
            client_id(secrets.token_bytes(), "worker", settings.federation, name, style=style),
            limits=settings.limits,
            clean=True,  # the next worker has devices send their updates again
            events=self._inbox,
        )
        self._policy = RetryPolicy(settings.limits.retry_pause_s, self)
        self._ring = KeyRing(enrolled=settings.enrolled, clock=clock)
        self._rate_limiter = RateLimiter(settings.limits)
        self._events: list[Event] = []
        self._state = State("waiting", 0, "", clock())
        self._aggregation: RoundAggregation | None = None
        self._digests: dict[str, str] = {}
        """Digests of the round's accepted updates by device."""
        self._is_started = self._is_stopped = False
        self._reports_ready = self._is_stalled = False
        self._reported_counts: dict[str, int] = {}
        self._report_counts_at = 0.0

    def send(self, command: messages.Command) -> None:
        """Queue a command of the server. May be called from any thread."""
        self._commands.append(command)
        if isinstance(command, Stop):
            self._policy.stop()
        self._inbox.put(_CommandQueued())

    def run(self) -> None:
        """Handle commands and messages until the command to stop.

        Raises:
            StoreError: If the journal cannot be opened before that command.
        """
        settings = self._settings
        writer = f"{settings.worker}-{os.getpid()}-{secrets.token_hex(4)}"
        store = partial(store_at, settings.updates, writer)
        self._journal = self._policy.run(
            lambda: Journal(settings.database, settings.federation, store(), shard_of=shard_of)
        )
        scheduler = UploadScheduler(settings.limits.asked_bytes, self._clock)
        self._receiver = UpdateReceiver(
            settings.rules, self._journal, settings.limits, self, self._rate_limiter, scheduler
        )
        try:
            while not self._is_stopped:
                self._step()
        finally:
            self._session.stop()
            self._journal.close()

    # -- the loop --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Handle all queued commands, then at most one message of a device; waits up to a second for it."""
        while self._commands:
            self._obey(self._commands.popleft())
        if self._is_stopped:
            return
        if self._is_stalled:
            self._retry_storage()
            return
        if self._reports_ready and (self._aggregation is None or self._session.settled):
            self._reports_ready = False
            self._sink.put(messages.Ready(0 if self._aggregation is None else self._aggregation.number))
        due_in = self._receiver.due_in(self._state)
        if due_in == 0.0:
            self._flush()
            self._request_uploads()
            due_in = self._receiver.due_in(self._state)
        longest = _SUBSCRIBED_S if self._reports_ready and self._session.connected else _MAX_WAIT_S
        try:
            event = self._inbox.get(timeout=longest if due_in is None else min(due_in, longest))
        except queue.Empty:
            self._report_refused()
            return
        match event:
            case IncomingMessage():
                self._handle(event)
            case Connected():
                self._reports_ready = True

    def _obey(self, command: messages.Command) -> None:
        match command:
            case messages.BeginRound():
                self._policy.run(partial(self._begin, command))
            case messages.UpdateKeys():
                self._ring.update(command.keys)
                self._update_devices()
            case messages.DeviceDeclined():
                self._answer((Answered(command.device, accepted=False),))
            case messages.EndRound():
                self._end(command)
            case Stop():
                self._is_stopped = True

    def _begin(self, command: messages.BeginRound) -> None:
        """Begin a round: restore its sums from the journal, then subscribe to the topics of its devices.

        Raises:
            StoreError: If the journal cannot be read.
        """
        self._ring.update(command.keys)
        opened = command.opened
        self._aggregation = command.spec.build(device="cpu")
        self._state = State("open", opened.number, opened.model_version, self._clock(), round=opened)
        self._update_devices()
        self._events.clear()
        self._digests = self._receiver.replay(self._aggregation, self._shards)
        answers = tuple(Answered(device, accepted=True) for device in self._digests)
        self._apply(ReceiveResult(answers=answers))
        # Subscribing again in each round delivers the messages that devices left retained there.
        self._session.subscribe(self._topics.shard_filters(self._shards), qos=1 | AS_PUBLISHED)
        if not self._is_started:
            self._session.start()
            self._is_started = True
        self._reports_ready = True

    def _update_devices(self) -> None:
        """Replace the known devices in the worker's state by those whose keys the worker has."""
        known = {name: RosterEntry(name, "", 0, True, 0.0) for name in self._ring.keys}
        self._state = replace(self._state, devices=Devices(known))

    def _end(self, command: messages.EndRound) -> None:
        """Send the sum of the ended round to the server, and forget the round.

        Updates that are still buffered are refused by the journal, because the round is closed in it.
        """
        ended, aggregation = self._state.round, self._aggregation
        if ended is None or aggregation is None or ended.number != command.round:
            self._sink.put(messages.RoundSum(command.round, None, messages.digest({})))
            return
        if self._receiver.has_batch:
            self._flush()
        ended = self._state.round or ended
        self._aggregation = None
        self._state = replace(self._state, phase="waiting", next_round=command.round + 1, round=None)
        with suppress(StoreError):  # what it journals are figures for people
            self._receiver.end_round(ended)
        partial_sum = aggregation.aggregator.partial() if command.summed else None
        self._sink.put(messages.RoundSum(command.round, partial_sum, messages.digest(self._digests)))

    # -- messages of devices ---------------------------------------------------------------------------------

    def _handle(self, message: IncomingMessage) -> None:
        """Handle a message of a device, from its topic to the results for the server. Never raises for its contents."""
        if message.retained and message.payload:
            self._session.publish(message.topic, b"", qos=0, retain=True)
            return
        device = ""
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
            if not message.payload or leaf != "shards" or len(numbers) != 3 or numbers[1] >= MAX_ROUNDS:
                return
            is_known, devices = device in self._ring.keys, len(self._ring.keys)
            size = len(message.payload)
            if self._rate_limiter.accepts(device, "updates", size, is_known=is_known, devices=devices):
                self._receive(device, numbers[1], message)
        except UnknownDevice:
            if self._rate_limiter.allow("answer", device, is_known=False):
                self._sink.put(messages.KeyRequest(device))
        except IdentityError as error:
            self._object(device, error.reason, error.message)
        except ProtocolError as error:
            self._object(device, "malformed", error.message)
        except StoreError as error:
            self.report_storage_error(error)

    def _receive(self, device: str, number: int, message: IncomingMessage) -> None:
        chunk = self._ring.open(device, message.topic, message.payload)
        traffic = PublishTraffic.of(message.topic, len(message.payload), qos=1)
        received = self._receiver.receive(device, number, chunk, traffic, self._state, self._aggregation)
        if self._receiver.due_in(self._state) == 0.0:
            self._flush()
        self._apply(received)
        self._request_uploads()

    def _flush(self) -> None:
        if self._aggregation is None or not self._receiver.has_batch:
            return
        try:
            received = self._receiver.flush(self._aggregation)
        except StoreError as error:  # nothing was acknowledged, so the devices send again
            self.report_storage_error(error)
            return
        accepted = [each for each in received.replies if each.ack.status == "accepted"]
        self._digests.update({each.device: each.ack.sha256 for each in accepted})
        self._apply(received)

    def _request_uploads(self) -> None:
        if self._aggregation is not None and self._state.round is not None:
            self._apply(self._receiver.request_uploads(self._state.round))

    def _apply(self, received: ReceiveResult) -> None:
        """Apply the answers in ``received`` to the worker's copy of the round, and send the server all results."""
        self._answer(received.answers)
        self._send_progress(received.replies, received.answers)

    def _answer(self, answers: tuple[Answered | TurnLost, ...]) -> None:
        opened = self._state.round
        if opened is None:
            return
        tasks = opened.assignments
        for each in answers:
            if isinstance(each, Answered):
                status: Status = "accepted" if each.accepted else "rejected"
                tasks = tasks.with_answer(each.device, status, each.reason)
        self._state = replace(self._state, round=replace(opened, assignments=tasks))

    # -- messages for the server -----------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Buffer an event for people; it is sent to the server with the next results."""
        self._events.append(event)

    def _send_progress(
        self, replies: tuple[Reply, ...] = (), answers: tuple[Answered | TurnLost, ...] = ()
    ) -> None:
        events, number = tuple(self._events), self._aggregation.number if self._aggregation else 0
        self._events.clear()
        if replies or answers or events:
            self._sink.put(messages.UpdatesHandled(number, replies, answers, events))

    def _object(self, device: str, reason: str, text: str) -> None:
        if self._rate_limiter.allow("unverified", device, is_known=device in self._ring.keys):
            self._events.append(Rejected(device=device, round=0, reason=reason, text=printable(text)))
            self._send_progress()

    def _report_refused(self) -> None:
        counts = {
            **self._rate_limiter.counts,
            "unfinished updates": self._receiver.dropped,
            "inbox full": self._inbox.dropped,
        }
        counts = {reason: count for reason, count in counts.items() if count}
        if counts != self._reported_counts and self._clock() >= self._report_counts_at:
            self._reported_counts = counts
            self._report_counts_at = self._clock() + self._settings.limits.notice_s
            self._sink.put(messages.RefusedCounts(counts))

    def report_storage_error(self, error: StoreError) -> None:
        """Send the server the storage error, and receive nothing until the journal can be written again."""
        self._is_stalled = True
        self._sink.put(messages.StorageFailed(error.message))

    def _retry_storage(self) -> None:
        """Wait, then try the journal again. If that succeeds, journal the batch and report that the worker is ready."""
        time.sleep(min(self._settings.limits.retry_pause_s, _MAX_WAIT_S))
        self._is_stalled = False
        try:
            self._journal.latest_run()
        except StoreError as error:
            self.report_storage_error(error)
            return
        self._flush()
        self._reports_ready = not self._is_stalled
