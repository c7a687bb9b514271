"""Where the messages of devices come in: who is let in, what it says, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

import msgspec

from edgefl.errors import IdentityError, ProtocolError, StoreError, UpdateRejected
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions, known_conditions
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl.wire.text import printable
from edgefl_server import events
from edgefl_server.announcer import Announcer
from edgefl_server.coordinator import roster, states
from edgefl_server.coordinator.claims import addressed
from edgefl_server.coordinator.fleet import Devices
from edgefl_server.coordinator.states import Rules, State
from edgefl_server.device_news import DeviceNews, ack_of, objection
from edgefl_server.identity.door import Door, Visitor
from edgefl_server.patience import CannotGoOn, Persist
from edgefl_server.publish.watch import Watch
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.journal import Journal
from edgefl_server.updates.rate_limit import AdmissionControl, RateLimiter
from edgefl_server.updates.receiver import Received, UpdateReceiver
from edgefl_server.updates.upload_scheduler import UploadScheduler
from edgefl_server.updates.validation import decline_reason

_MOST_ROUNDS = 2**31
_UNKNOWN = "?"  # who sent what came on a topic that cannot be read


_Said = messages.UpdateChunk | messages.Progress | messages.Hello | messages.Status | messages.Decline
_KINDS: dict[str, type[_Said]] = {
    "updates": messages.UpdateChunk,
    "shards": messages.UpdateChunk,
    "progress": messages.Progress,
    "hello": messages.Hello,
    "status": messages.Status,
    "declines": messages.Decline,
}


_NUMBERS = {"updates": 2, "shards": 3}
"""In their topics; the one before the last is the round's."""


class Course(Protocol):
    """The run that messages are about, and what follows from them."""

    @property
    def state(self) -> State: ...

    @property
    def active(self) -> RoundAggregation | None: ...

    def advance(self, event: states.Event, hello: bytes | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Tellers:
    """Whom it is told: devices (``answer``), people (``emit``, ``news``, ``announcer``), and the disk's ``troubled``."""

    answer: Callable[[str, messages.Ack], None]
    emit: Callable[[events.Event], None]
    troubled: Callable[[StoreError], None]
    news: DeviceNews
    announcer: Announcer


@dataclass(eq=False)
class Reception:
    """Takes the messages of devices, one after the other. ``door`` knows their keys; ``clock`` gives epoch seconds; updates
    that cannot be kept just now are waited for by ``persist``."""

    spec: RunSpec
    rules: Rules
    journal: Journal
    course: Course
    tellers: Tellers
    _: KW_ONLY
    door: Door
    watch: Watch
    clock: Callable[[], float]
    persist: Persist

    def __post_init__(self) -> None:
        self._news = self.tellers.news
        self._topics = Topics(self.spec.federation)
        self._gate = RateLimiter(self.spec.limits)
        self._admission = AdmissionControl(self.rules.seed, self.spec.limits)
        scheduler = UploadScheduler(self.spec.limits.asked_bytes, self.clock)
        self.intake = UpdateReceiver(
            self.rules, self.journal, self.spec.limits, self.tellers, self._gate, scheduler
        )

    @property
    def turned_away(self) -> Mapping[str, int]:
        """How many messages were not read, or not kept, by why."""
        return {**self._gate.counts, "unfinished updates": self.intake.dropped}

    @property
    def _state(self) -> State:
        return self.course.state

    def at_start(self, state: State) -> State:
        """``state`` as the journal has it, in which devices that are let in no more are away."""
        kept = self._admission.admitted(state, state.devices)
        devices = {
            name: roster.gone(device) if self.door.shuts_out(name) else device
            for name, device in state.devices.items()
            if name in kept
        }
        return replace(state, devices=Devices(devices))

    def take(self, message: IncomingMessage) -> None:
        """What it says is done, or what is wrong with it is told. Never raises for what was sent."""
        if not message.payload:
            return
        device, leaf, proven = _UNKNOWN, "", False
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
            kind = _KINDS.get(leaf)
            whole = len(numbers) == _NUMBERS.get(leaf, 0)
            if kind is not None and whole and self._admitted(device, leaf, len(message.payload)):
                visitor = self._checked(device, kind, message)
                proven = True
                self._let_in(visitor, numbers, message)
        except IdentityError as error:
            self._leave_out(device)
            # A status comes before the hello that brings its key in: the door keeps it.
            if leaf != "status" and self.door.is_news(device, error):
                text = printable(error.message)
                self._object(events.Rejected(device=device, round=0, reason=error.reason, text=text), proven)
        except ProtocolError as error:
            if device in self._state.devices:
                self._news.heard(device, "sent what cannot be read", self.clock())
            text = printable(error.message)
            self._object(events.Rejected(device=device, round=0, reason="malformed", text=text), proven)
        except CannotGoOn:
            raise
        except StoreError as error:  # not acknowledged, so it comes again
            self.tellers.troubled(error)

    def _admitted(self, device: str, leaf: str, size: int) -> bool:
        devices = self._state.devices
        known = device in devices or (leaf == "hello" and self.door.vouches_for(device))
        return self._gate.accepts(device, leaf, size, is_known=known, devices=len(devices))

    def _checked(self, device: str, kind: type[_Said], message: IncomingMessage) -> Visitor[_Said]:
        most = self.spec.limits.max_devices
        return self.door.check(kind, device, message.topic, message.payload, most_devices=most)

    def _let_in(self, visitor: Visitor[_Said], numbers: tuple[int, ...], message: IncomingMessage) -> None:
        device = visitor.device
        if visitor.again:
            return
        said = visitor.message
        # After the signature: nobody else can use up a device's share. Before anything is written.
        if not isinstance(said, messages.UpdateChunk) and not self._gate.allow(
            "message", device, is_known=device in self._state.devices
        ):
            return
        self.door.admit(visitor)
        if (trouble := self.door.trouble()) is not None:
            self.tellers.troubled(trouble)
        match said:
            case messages.UpdateChunk():
                came = PublishTraffic.of(message.topic, len(message.payload), qos=1)
                self._chunk(device, numbers[-2], said, came)
            case messages.Progress():
                self._progress(device, said)
            case messages.Hello():
                self._hello(device, said)
                if (status := self.door.presence(device)) is not None:
                    self._status(device, status)
            case messages.Status():
                self._status(device, said)
            case messages.Decline():
                self._declined(device, said)

    def littered(self, message: IncomingMessage) -> None:
        """Refuse the update of a device that left a retained message on a topic of its own, where none may be.

        A broker may let others write there, and they may have copies of what the device sent in earlier rounds. So only
        a message counts against it that it signed itself, and that is new.
        """
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
        except ProtocolError:
            return
        opened, kind = self._state.round, _KINDS.get(leaf)
        task = opened.assignments.get(device) if opened is not None else None
        if opened is None or task is None or task.status != "open" or kind is None:
            return
        if len(numbers) != _NUMBERS.get(leaf, 0) or (numbers and numbers[-2] < opened.number):
            return
        if not self.door.is_first_sent(kind, device, message.topic, message.payload):
            return
        text = "it leaves retained messages at the broker, which fill its memory"
        refused = events.Rejected(device=device, round=opened.number, reason="retained", text=text)
        self.tellers.emit(refused)
        ack = messages.Ack(
            round=task.round, nonce=task.nonce, status="rejected", reason=refused.reason, text=text
        )
        self.tellers.answer(device, ack)
        self.course.advance(states.Answered(device, False, reason=text, nonce=task.nonce))

    def step(self) -> None:
        """What is due by time."""
        if self.intake.due_in(self._state) == 0.0:
            self.commit()
            self.ask()

    def ask(self) -> None:
        """Ask the devices for their updates whose turn begins."""
        if (opened := self._state.round) is None:
            return
        self._follow(self.intake.request_uploads(opened))

    def commit(self) -> None:
        """Journal the updates that have come and are good, and tell their devices; nothing where there are none."""
        active = self.course.active
        if not self.intake.has_batch or active is None:
            return
        try:
            received = self.persist(lambda: self.intake.flush(active))
        except StoreError:  # asked to stop meanwhile; not acknowledged, so they come again
            return
        self._follow(received)

    def _follow(self, received: Received) -> None:
        for reply in received.replies:
            self.tellers.answer(reply.device, reply.ack)
        if received.answers:
            self.course.advance(states.Answers(received.answers))

    # -- what devices say ------------------------------------------------------------------------------------

    def _progress(self, device: str, progress: messages.Progress) -> None:
        known = self._state.devices.get(device)
        if known is not None:
            self._alive(device)
            self._news.progress(device, known.tier, progress, self.clock())
            if progress.stage.startswith(messages.FAILED + messages.LOST_CHUNK) and self._works(device):
                self.watch.failed()

    def _status(self, device: str, status: messages.Status) -> None:
        if device in self._state.devices:
            self.course.advance(states.DeviceStatus(device, status.online))
        else:
            self._gate.set_presence(device, online=status.online)

    def _hello(self, device: str, hello: messages.Hello) -> None:
        if device not in self._state.devices and not self._finds_room(device):
            return
        self._news.greeted(device, self.clock())
        if (refused := objection(self.rules, device, hello)) is not None:
            self._object(refused)
        samples = max(0, min(hello.samples, states.MOST_SAMPLES))
        online = device in self._state.devices or self._gate.take_presence(device)
        told = hello.conditions
        conditions = known_conditions(told) if isinstance(told, Conditions) else UNKNOWN_CONDITIONS
        greeting = states.DeviceHello(
            device, hello.memory_bytes, samples, online, conditions, hello.again is True
        )
        self.course.advance(greeting, hello=messages.encode(hello))
        self.tellers.announcer.newcomer(self._state, device, self._state.devices[device].tier)

    def _finds_room(self, device: str) -> bool:
        """Whether there is a place for a device that is not in. Who gets none, or loses it, is told when to come again."""
        ruling = self._admission.decide(device, self._state)
        if ruling.replaces:
            self.course.advance(states.DeviceLeft(ruling.replaces))
        for name in (ruling.replaces,) if ruling.is_admitted else (device,):
            if name:
                self._gate.counts["no room"] += 1
            if name and self._gate.allow("answer", name):
                text = "there is no room for this device now: the lot decided who is let in"
                ack = messages.Ack(
                    round=0, nonce="", status="rejected", reason=messages.COME_LATER, text=text
                )
                later_s = self._admission.retry_after_s(name)
                self.tellers.answer(name, msgspec.structs.replace(ack, later_s=later_s))
        return ruling.is_admitted

    def _chunk(self, device: str, number: int, chunk: messages.UpdateChunk, came: PublishTraffic) -> None:
        if not 0 <= number < _MOST_ROUNDS:
            raise ProtocolError(
                f"{device} sent an update for round {number}; rounds lie below {_MOST_ROUNDS}"
            )
        self._alive(device)
        if device in self._state.devices:
            stage = f"sending its update, chunk {chunk.index + 1} of {chunk.count}"
            self._news.heard(device, stage, self.clock())
        received = self.intake.receive(device, number, chunk, came, self._state, self.course.active)
        if self.intake.due_in(self._state) == 0.0:
            self.commit()
        for reply in received.replies:
            self.tellers.answer(reply.device, reply.ack)
        for answer in received.answers:
            self.course.advance(answer)
        self.ask()

    def _declined(self, device: str, decline: messages.Decline) -> None:
        """Journal it before the round goes on without the device. Old news, of a round that is over, is no news."""
        self._alive(device)
        current = self._state.round
        if current is None or not current.version_of(decline.round) or device not in current.assignments:
            return
        if current.buffered and current.assignments[device].nonce != decline.nonce:
            return  # of a task that is over, and it has another one
        try:
            task = addressed(self._state, device, decline.round, decline.nonce)
        except UpdateRejected as refusal:
            self._misaddressed(device, current.number, refusal)
            return
        if task.status != "open":
            return
        bundle = self.spec.exchange(current.position).tiers[task.tier].bundle
        reason, text = decline_reason(decline, carry_needed=bundle.manifest.carry_needed)
        try:
            self.journal.decline(self.rules.run, task, reason)
        except StoreError as error:  # whoever takes up the round announces it, and is told again
            self.tellers.troubled(error)
        self.tellers.emit(events.Declined(device=device, round=task.round, reason=reason, text=text))
        self.course.advance(states.Declined(device, task.nonce, reason))

    def _leave_out(self, device: str) -> None:
        """Rounds go on without a device that has no good key any more: that it is offline it cannot say itself."""
        known = self._state.devices.get(device)
        if known is None or known == roster.gone(known):
            return
        try:
            if self.door.shuts_out(device):
                self.course.advance(states.DeviceStatus(device, online=False, for_good=True))
        except StoreError as error:
            self.tellers.troubled(error)

    # -- what they are told ----------------------------------------------------------------------------------

    def _misaddressed(self, device: str, number: int, refusal: UpdateRejected) -> None:
        if self._gate.allow("answer", device):
            text = printable(refusal.message)
            self.tellers.emit(events.Rejected(device=device, round=number, reason=refusal.reason, text=text))

    def _object(self, refused: events.Rejected, proven: bool = True) -> None:
        """Tell people, and the device itself, what is wrong with a message that is no update."""
        known = refused.device in self._state.devices
        if not self._gate.allow("answer" if proven else "unverified", refused.device, is_known=known):
            return
        self.tellers.emit(refused)
        if refused.device != _UNKNOWN:
            self.tellers.answer(refused.device, ack_of(refused))

    def _works(self, device: str) -> bool:
        """Whether an update is waited for of the device."""
        current = self._state.round
        task = current.assignments.get(device) if current is not None else None
        return task is not None and task.status == "open"

    def _alive(self, device: str) -> None:
        """Whoever sends is there, whatever its last will said."""
        known = self._state.devices.get(device)
        if known is not None and not known.online:
            self.course.advance(states.DeviceStatus(device, online=True))
