"""A worker: takes the updates of its shards in place of the server, and gives their sum when a round is over.

It has a broker session of its own, which only listens: what devices are told goes through the server, whose key signs it.
An update is journaled before the server hears of it; so a worker may be killed at any instant, and the next one finds in the
journal exactly what was accepted.
"""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from edgefl.errors import IdentityError, ProtocolError, StoreError
from edgefl.system.clock import steady_time
from edgefl.wire.mqtt.address import client_id
from edgefl.wire.mqtt.connection import AS_PUBLISHED
from edgefl.wire.mqtt.envelope import unwrap, verified
from edgefl.wire.mqtt.events import Connected, Inbox, IncomingMessage
from edgefl.wire.mqtt.messages import Ack, UpdateChunk, decode
from edgefl.wire.mqtt.session import Session, inbox_of
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl.wire.text import printable
from edgefl_server.coordinator.fleet import Devices
from edgefl_server.coordinator.roster import Device
from edgefl_server.coordinator.states import Answered, State, TurnLost
from edgefl_server.events import Event, Rejected
from edgefl_server.identity.door import check_good, unknown_key, unsigned
from edgefl_server.identity.registry import DeviceKey
from edgefl_server.patience import Patience
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.shards import messages
from edgefl_server.shards.slots import shard_of, shards_of
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.places import store_at
from edgefl_server.updates.rate_limit import RateLimiter
from edgefl_server.updates.receiver import Received, UpdateReceiver
from edgefl_server.updates.upload_scheduler import UploadScheduler

# Whose word an update is, as a worker can tell: by the keys that the server gave it.


class Stranger(IdentityError):
    """The server has not told of a device yet."""


class KeyRing:
    """The keys of the devices that the server told of. ``enrolled``: devices have to be on a list."""

    def __init__(self, *, enrolled: bool, clock: Callable[[], float]) -> None:
        self._enrolled = enrolled
        self._clock = clock
        self.keys: dict[str, tuple[DeviceKey, ...]] = {}

    def take(self, keys: Mapping[str, tuple[DeviceKey, ...] | None]) -> None:
        """What the server tells; None: of no device of the run."""
        for device, each in keys.items():
            if each is None:
                self.keys.pop(device, None)
            else:
                self.keys[device] = each

    def opened(self, device: str, topic: str, payload: bytes) -> UpdateChunk:
        """A chunk that ``device`` itself sent. IdentityError if it is not its word, Stranger if that cannot be known yet;
        ProtocolError if it is malformed."""
        keys = self.keys.get(device)
        if keys is None:
            raise Stranger(
                "unknown-device", f"device {device} has not said hello; connect again", device=device
            )
        envelope = unwrap(payload, UpdateChunk)
        if envelope is None:
            if self._enrolled or keys:
                raise unsigned(UpdateChunk, device, enrolled=self._enrolled)
            return decode(UpdateChunk, payload)
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and (self._enrolled or keys):
            raise unknown_key(device, envelope, keys)
        if known is not None:
            check_good(device, known, self._clock())
        return verified(UpdateChunk, topic, envelope)


_LONGEST_WAIT_S = 1.0
_SUBSCRIBED_S = 0.01
"""Between two looks whether the broker has answered for the subscriptions."""
_ROUNDS = 2**31


@dataclass(frozen=True)
class _Woken:
    """An order waits."""


class Worker:
    """``say`` takes what the server is told, on the thread of :meth:`run`. ``clock`` gives epoch seconds, never set back."""

    def __init__(
        self,
        told: messages.Told,
        say: Callable[[messages.News], None],
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._told = told
        self._say = say
        self._clock = clock
        self._shards = shards_of(told.worker, told.workers)
        self._topics = Topics(told.federation)
        self._orders: deque[messages.Order] = deque()
        self._inbox: Inbox[object] = inbox_of(told.limits)
        self._session = Session(
            told.address,
            client_id(
                secrets.token_bytes(),
                "worker",
                told.federation,
                f"{told.worker}-{told.workers}",
                style=told.address.client_ids,
            ),
            limits=told.limits,
            clean=True,  # who comes after this one asks devices anew
            events=self._inbox,
        )
        self._patience = Patience(told.limits.retry_pause_s, self._troubled)
        self._ring = KeyRing(enrolled=told.enrolled, clock=clock)
        self._gate = RateLimiter(told.limits)
        self._events: list[Event] = []
        self._state = State("waiting", 0, "", clock())
        self._active: RoundAggregation | None = None
        self._taken: dict[str, str] = {}
        self._started = self._stopped = False
        self._to_say_ready = self._in_trouble = False
        self._told_counts = dict(self._gate.counts), 0.0

    def tell(self, order: messages.Order) -> None:
        """An order of the server; from any thread."""
        self._orders.append(order)
        if isinstance(order, messages.Stop):
            self._patience.end()
        self._inbox.put(_Woken())

    def run(self) -> None:
        """Until it is told to stop. StoreError where that comes while the journal cannot be opened."""
        told = self._told
        writer = f"{told.worker}-{os.getpid()}-{secrets.token_hex(4)}"
        self._journal = self._patience.persist(
            lambda: Journal(told.database, told.federation, store_at(told.updates, writer), shard_of=shard_of)
        )
        scheduler = UploadScheduler(told.limits.asked_bytes, self._clock)
        self._intake = UpdateReceiver(told.rules, self._journal, told.limits, self, self._gate, scheduler)
        try:
            while not self._stopped:
                self._next()
        finally:
            self._session.stop()
            self._journal.close()

    # -- the loop --------------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._orders:
            self._obey(self._orders.popleft())
        if self._stopped:
            return
        if self._in_trouble:
            self._try_again()
            return
        self._maybe_ready()
        if self._intake.due_in(self._state) == 0.0:
            self._commit()
            self._ask()
        try:
            event = self._inbox.get(timeout=self._timeout())
        except queue.Empty:
            self._tell_turned_away()
            return
        match event:
            case IncomingMessage():
                self._take(event)
            case Connected():
                self._to_say_ready = True

    def _timeout(self) -> float:
        wait = self._intake.due_in(self._state)
        longest = _SUBSCRIBED_S if self._to_say_ready and self._session.connected else _LONGEST_WAIT_S
        return longest if wait is None else min(wait, longest)

    def _obey(self, order: messages.Order) -> None:
        match order:
            case messages.Begin():
                self._patience.persist(partial(self._begin, order))
            case messages.Know():
                self._ring.take(order.keys)
                self._knows()
            case messages.Declined():
                self._answered((Answered(order.device, accepted=False),))
            case messages.End():
                self._end(order)
            case messages.Stop():
                self._stopped = True

    def _begin(self, order: messages.Begin) -> None:
        """Take up a round: what the journal has of it is added first."""
        self._ring.take(order.keys)
        opened = order.opened
        self._active = order.spec.build(device="cpu")
        self._state = State("open", opened.number, opened.model_version, self._clock(), round=opened)
        self._knows()
        self._events.clear()
        self._taken = self._intake.replay(self._active, self._shards)
        answers = tuple(Answered(device, accepted=True) for device in self._taken)
        self._answered(answers)
        self._tell(answers=answers)
        # Again in each round: this brings what devices left retained there.
        self._session.subscribe(self._topics.shard_filters(self._shards), qos=1 | AS_PUBLISHED)
        if not self._started:
            self._session.start()
            self._started = True
        self._to_say_ready = True

    def _knows(self) -> None:
        """Devices that it has heard of: all others are strangers."""
        known = {name: Device(name, "", 0, True, 0.0) for name in self._ring.keys}
        self._state = replace(self._state, devices=Devices(known))

    def _maybe_ready(self) -> None:
        if self._to_say_ready and (self._active is None or self._session.settled):
            self._to_say_ready = False
            self._say(messages.Ready(0 if self._active is None else self._active.number))

    def _end(self, order: messages.End) -> None:
        """What came and is not journaled is refused: the round is closed in the journal already."""
        ended, active = self._state.round, self._active
        if ended is None or active is None or ended.number != order.round:
            self._say(messages.Summed(order.round, None, messages.digest({})))
            return
        if self._intake.has_batch:
            self._commit()
        ended = self._state.round or ended
        self._active = None
        self._state = replace(self._state, phase="waiting", next_round=order.round + 1, round=None)
        with suppress(StoreError):  # figures for people
            self._intake.end_round(ended)
        self._say(
            messages.Summed(
                order.round,
                active.aggregator.partial() if order.summed else None,
                messages.digest(self._taken),
            )
        )

    # -- what devices send -----------------------------------------------------------------------------------

    def _take(self, message: IncomingMessage) -> None:
        """A chunk of an update, or something else. Never raises for what was sent."""
        if message.retained and message.payload:
            self._session.publish(message.topic, b"", qos=0, retain=True)
            return
        device = ""
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
            if not message.payload or leaf != "shards" or len(numbers) != 3 or numbers[1] >= _ROUNDS:
                return
            known = device in self._ring.keys
            if self._gate.accepts(
                device, "updates", len(message.payload), is_known=known, devices=len(self._ring.keys)
            ):
                self._chunk(device, numbers[1], message)
        except Stranger:
            if self._gate.allow("answer", device, is_known=False):
                self._say(messages.WhoIs(device))
        except IdentityError as error:
            self._object(device, error.reason, error.message)
        except ProtocolError as error:
            self._object(device, "malformed", error.message)
        except StoreError as error:
            self._troubled(error)

    def _chunk(self, device: str, number: int, message: IncomingMessage) -> None:
        chunk = self._ring.opened(device, message.topic, message.payload)
        came = PublishTraffic.of(message.topic, len(message.payload), qos=1)
        received = self._intake.receive(device, number, chunk, came, self._state, self._active)
        if self._intake.due_in(self._state) == 0.0:
            self._commit()
        self._follow(received)
        self._ask()

    def _commit(self) -> None:
        active = self._active
        if active is None or not self._intake.has_batch:
            return
        try:
            received = self._intake.flush(active)
        except StoreError as error:  # not acknowledged, so they come again
            self._troubled(error)
            return
        for reply in received.replies:
            if reply.ack.status == "accepted":
                self._taken[reply.device] = reply.ack.sha256
        self._follow(received)

    def _ask(self) -> None:
        """Whose turn it is to send what it offered."""
        if self._active is not None and self._state.round is not None:
            self._follow(self._intake.request_uploads(self._state.round))

    def emit(self, event: Event) -> None:
        """Keep an event for the server."""
        self._events.append(event)

    def _follow(self, received: Received) -> None:
        answers = tuple(each for each in received.answers if isinstance(each, Answered))
        self._answered(answers)
        self._tell(tuple((each.device, each.ack) for each in received.replies), received.answers)

    def _answered(self, answers: tuple[Answered, ...]) -> None:
        opened = self._state.round
        if opened is None:
            return
        tasks = opened.assignments
        for each in answers:
            tasks = tasks.answered(each.device, "accepted" if each.accepted else "rejected", each.reason)
        self._state = replace(self._state, round=replace(opened, assignments=tasks))

    # -- what the server is told -----------------------------------------------------------------------------

    def _tell(
        self, acks: tuple[tuple[str, Ack], ...] = (), answers: tuple[Answered | TurnLost, ...] = ()
    ) -> None:
        events, number = tuple(self._events), self._active.number if self._active else 0
        self._events.clear()
        if acks or answers or events:
            self._say(messages.Took(number, acks, answers, events))

    def _object(self, device: str, reason: str, text: str) -> None:
        if self._gate.allow("unverified", device, is_known=device in self._ring.keys):
            self._events.append(Rejected(device=device, round=0, reason=reason, text=printable(text)))
            self._tell()

    def _tell_turned_away(self) -> None:
        counts, again = self._told_counts
        now = {
            **self._gate.counts,
            "unfinished updates": self._intake.dropped,
            "inbox full": self._inbox.dropped,
        }
        now = {why: count for why, count in now.items() if count}
        if now != counts and self._clock() >= again:
            self._told_counts = now, self._clock() + self._told.limits.notice_s
            self._say(messages.TurnedAway(now))

    def _troubled(self, error: StoreError) -> None:
        self._in_trouble = True
        self._say(messages.Troubled(error.message))

    def _try_again(self) -> None:
        """Once what waits is journaled, devices are asked for what could not be kept."""
        time.sleep(min(self._told.limits.retry_pause_s, _LONGEST_WAIT_S))
        self._in_trouble = False
        try:
            self._journal.latest_run()
        except StoreError as error:
            self._troubled(error)
            return
        self._commit()
        self._to_say_ready = not self._in_trouble
