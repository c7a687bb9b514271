"""Handler of devices' messages: rate limits, verification, and the events and replies that follow from each message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from edgefl.errors import IdentityError, ProtocolError, StoreError, UpdateRejected
from edgefl.system.sizes import mebibytes
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions, known_conditions
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl.wire.text import MOST_TEXT, printable
from edgefl_server import events
from edgefl_server.coordinator import roster, states
from edgefl_server.coordinator.claims import find_task
from edgefl_server.coordinator.fleet import Assignment, Devices
from edgefl_server.coordinator.states import Rules, State
from edgefl_server.identity.authenticator import Authenticator, VerifiedMessage
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.publish.publisher import AnnouncementMonitor
from edgefl_server.reporter import MAX_NAME, EventReporter
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.journal import Journal
from edgefl_server.updates.rate_limit import AdmissionControl, RateKind, RateLimiter
from edgefl_server.updates.receiver import MAX_ROUNDS, Reply, UpdateReceiver
from edgefl_server.updates.validation import decline_reason

_UNKNOWN = "?"
"""Device of a message whose topic cannot be read."""

_Message = messages.UpdateChunk | messages.Progress | messages.Hello | messages.Status | messages.Decline
_KINDS: dict[str, type[_Message]] = {
    "updates": messages.UpdateChunk,
    "shards": messages.UpdateChunk,
    "progress": messages.Progress,
    "hello": messages.Hello,
    "status": messages.Status,
    "declines": messages.Decline,
}
_NUMBERS = {"updates": 2, "shards": 3}
"""Number of numeric levels at the end of a topic, by kind. The last but one is the round."""


@dataclass(frozen=True)
class HandlerResult:
    """Consequences of one message, which the caller carries out in this order.

    Attributes:
        replies: Acknowledgements to send first.
        events: Events for the coordinator, in order.
        tasks: Open tasks to send again.
    """

    replies: tuple[Reply, ...] = ()
    events: tuple[states.Event, ...] = ()
    tasks: tuple[Assignment, ...] = ()


NOTHING = HandlerResult()


class MessageHandler:
    """Handler of the messages of a run's devices. It verifies each message and returns the consequences; it sends nothing.

    Args:
        spec: Specification of the run.
        journal: Journal of declined tasks.
        receiver: Receiver of updates.
        rate_limiter: Limits of messages and answers.
        authenticator: Keys of the devices.
        reporter: Receives events and warnings for people.
        watch: Restores blobs that devices do not find at the broker.
        memory_plans: Memory that tiers require.
    """

    def __init__(
        self,
        spec: RunSpec,
        journal: Journal,
        receiver: UpdateReceiver,
        rate_limiter: RateLimiter,
        authenticator: Authenticator,
        reporter: EventReporter,
        watch: AnnouncementMonitor,
        memory_plans: MemoryPlans,
    ) -> None:
        self._spec = spec
        self._journal = journal
        self._receiver = receiver
        self._rate_limiter = rate_limiter
        self._authenticator = authenticator
        self._reporter = reporter
        self._watch = watch
        self._memory_plans = memory_plans
        self._topics = Topics(spec.federation)
        self._admission = AdmissionControl(spec.rules.seed, spec.limits)

    @property
    def refused(self) -> Mapping[str, int]:
        """Numbers of messages that were not read or stored, by reason."""
        return {**self._rate_limiter.counts, "unfinished updates": self._receiver.dropped}

    def admit_known(self, state: State) -> State:
        """Return the journaled ``state`` with only the devices that the starting server admits.

        Devices beyond the limit of devices are removed. Devices without a valid key are set offline, and rounds do not
        wait for them.
        """
        admitted = self._admission.select_admitted(state, state.devices)
        devices = {
            name: roster.gone(device) if self._authenticator.is_barred(name) else device
            for name, device in state.devices.items()
            if name in admitted
        }
        return replace(state, devices=Devices(devices))

    def handle(
        self, message: IncomingMessage, state: State, aggregation: RoundAggregation | None
    ) -> HandlerResult:
        """Handle a message of a device. Never raises for its contents.

        Args:
            message: The message.
            state: State of the coordinator.
            aggregation: Sums of the open round; None if no round receives updates.

        Returns:
            Replies, events and tasks that follow; empty for a message that is ignored.
        """
        if not message.payload:
            return NOTHING
        device, leaf, is_verified = _UNKNOWN, "", False
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
            kind = _KINDS.get(leaf)
            if kind is None or len(numbers) != _NUMBERS.get(leaf, 0):
                return NOTHING
            checked = self._verify(kind, device, leaf, message, state)
            is_verified = True
            if checked is not None:
                return self._handle_verified(checked, message, numbers, state, aggregation)
        except IdentityError as error:
            # A status comes before the hello that introduces its key. The authenticator keeps it, so it is no error.
            is_reported = leaf != "status" and self._authenticator.is_new(device, error)
            replies = (
                self._object(device, error.reason, printable(error.message), state, is_verified)
                if is_reported
                else ()
            )
            return HandlerResult(replies, self._offline_event(device, state))
        except ProtocolError as error:
            if device in state.devices:
                self._reporter.note_stage(device, "sent what cannot be read")
            return HandlerResult(
                self._object(device, "malformed", printable(error.message), state, is_verified)
            )
        except StoreError as error:  # nothing is acknowledged, so the device sends again
            self._reporter.report_storage_error(error)
        return NOTHING

    def _verify(
        self, kind: type[_Message], device: str, leaf: str, message: IncomingMessage, state: State
    ) -> VerifiedMessage[_Message] | None:
        """Verify a message. Return None if the rate limit refuses it before that, or if the message was accepted before.

        Raises:
            IdentityError, ProtocolError: As :meth:`~edgefl_server.identity.authenticator.Authenticator.verify`.
        """
        # The rate limit comes before the signature, whose verification is what makes a flood expensive.
        is_listed = leaf == "hello" and self._authenticator.is_listed(device)
        is_known, devices = device in state.devices or is_listed, len(state.devices)
        size = len(message.payload)
        if not self._rate_limiter.accepts(device, leaf, size, is_known=is_known, devices=devices):
            return None
        most = self._spec.limits.max_devices
        checked = self._authenticator.verify(kind, device, message.topic, message.payload, max_devices=most)
        return None if checked.is_copy else checked

    def _handle_verified(
        self,
        checked: VerifiedMessage[_Message],
        message: IncomingMessage,
        numbers: tuple[int, ...],
        state: State,
        aggregation: RoundAggregation | None,
    ) -> HandlerResult:
        # A device's own rate comes after the signature, so that no other client can use it up, and before anything is
        # written. Chunks are limited in bytes by the receiver.
        device, content = checked.device, checked.message
        if not isinstance(content, messages.UpdateChunk) and not self._rate_limiter.allow(
            "message", device, is_known=device in state.devices
        ):
            return NOTHING
        self._authenticator.accept(checked)
        if (error := self._authenticator.take_error()) is not None:
            self._reporter.report_storage_error(error)
        match content:
            case messages.UpdateChunk():
                traffic = PublishTraffic.of(message.topic, len(message.payload), qos=1)
                return self._chunk(device, numbers[-2], content, traffic, state, aggregation)
            case messages.Progress():
                return self._progress(device, content, state)
            case messages.Hello():
                return self._hello(device, content, state)
            case messages.Status():
                return self._status(device, content, state)
            case messages.Decline():
                return self._decline(device, content, state)

    def handle_retained(self, message: IncomingMessage, state: State) -> HandlerResult:
        """Refuse the update of a device that published a retained message on a topic where none is allowed.

        A broker may let other clients publish there, and they may have copies of earlier messages. So the message
        counts only if the device signed it, it is new, and the device has an open task. Otherwise the result is empty.
        """
        try:
            device, leaf, numbers = self._topics.parse_device(message.topic)
        except ProtocolError:
            return NOTHING
        opened, kind = state.round, _KINDS.get(leaf)
        task = opened.assignments.get(device) if opened is not None else None
        if opened is None or task is None or task.status != "open" or kind is None:
            return NOTHING
        if len(numbers) != _NUMBERS.get(leaf, 0) or (numbers and numbers[-2] < opened.number):
            return NOTHING
        if not self._authenticator.is_first(kind, device, message.topic, message.payload):
            return NOTHING
        text = "it leaves retained messages at the broker, which fill its memory"
        self._reporter.emit(events.Rejected(device=device, round=opened.number, reason="retained", text=text))
        ack = messages.Ack(
            round=task.round, nonce=task.nonce, status="rejected", reason="retained", text=text
        )
        answer = states.Answered(device, False, reason=text, nonce=task.nonce)
        return HandlerResult((Reply(device, ack),), (answer,))

    # -- kinds of messages -----------------------------------------------------------------------------------

    def _chunk(
        self,
        device: str,
        number: int,
        chunk: messages.UpdateChunk,
        traffic: PublishTraffic,
        state: State,
        aggregation: RoundAggregation | None,
    ) -> HandlerResult:
        if not 0 <= number < MAX_ROUNDS:
            raise ProtocolError(f"{device} sent an update for round {number}; rounds lie below {MAX_ROUNDS}")
        if device in state.devices:
            stage = f"sending its update, chunk {chunk.index + 1} of {chunk.count}"
            self._reporter.note_stage(device, stage)
        received = self._receiver.receive(device, number, chunk, traffic, state, aggregation)
        return HandlerResult(received.replies, (*_online_event(device, state), *received.answers))

    def _progress(self, device: str, progress: messages.Progress, state: State) -> HandlerResult:
        known = state.devices.get(device)
        if known is None:
            return NOTHING
        self._reporter.report_progress(device, known.tier, progress)
        task = state.round.assignments.get(device) if state.round is not None else None
        is_working = task is not None and task.status == "open"
        if is_working and progress.stage.startswith(messages.FAILED + messages.LOST_CHUNK):
            self._watch.restore_missing()
        return HandlerResult(events=_online_event(device, state))

    def _hello(self, device: str, hello: messages.Hello, state: State) -> HandlerResult:
        is_known = device in state.devices
        replies: tuple[Reply, ...] = ()
        coming: tuple[states.Event, ...] = ()
        if not is_known:
            decision = self._admission.decide(device, state)
            if not decision.is_admitted:
                return HandlerResult(self._refuse_place(device), self._first_status(device, is_known=False))
            if decision.replaces:
                replies = self._refuse_place(decision.replaces)
                coming = (states.DeviceLeft(decision.replaces),)
        self._reporter.count_hello(device)
        objection = tier_objection(self._memory_plans.apply(self._spec.rules), device, hello)
        if objection is not None:
            replies += self._object(device, *objection, state)
        conditions = hello.conditions
        event = states.DeviceHello(
            device,
            hello.memory_bytes,
            max(0, min(hello.samples, states.MOST_SAMPLES)),
            is_known or self._rate_limiter.take_presence(device),
            known_conditions(conditions) if isinstance(conditions, Conditions) else UNKNOWN_CONDITIONS,
            hello.again is True,
            messages.encode(hello),
        )
        return HandlerResult(replies, (*coming, event, *self._first_status(device, is_known=True)))

    def _first_status(self, device: str, *, is_known: bool) -> tuple[states.Event, ...]:
        """Return the event for a status (online or offline) of a device that arrived before the hello with the
        device's key.

        No event is returned if no such status arrived. If the device is not admitted to the run (``is_known`` False),
        the rate limiter stores the status instead.
        """
        status = self._authenticator.take_status(device)
        if status is None:
            return ()
        if is_known:
            return (states.DeviceStatus(device, status.online),)
        self._rate_limiter.set_presence(device, online=status.online)
        return ()

    def _refuse_place(self, device: str) -> tuple[Reply, ...]:
        """Return the reply to a device that the limit of devices does not admit; it names the time of the device's
        next attempt.

        The result is empty if the rate limit does not allow a reply.
        """
        self._rate_limiter.counts["no room"] += 1
        if not self._rate_limiter.allow("answer", device):
            return ()
        ack = messages.Ack(
            round=0,
            nonce="",
            status="rejected",
            reason=messages.COME_LATER,
            text="there is no room for this device now: the lot decided who is let in",
        )
        later_s = self._admission.retry_after_s(device)
        return (Reply(device, msgspec.structs.replace(ack, later_s=later_s)),)

    def _status(self, device: str, status: messages.Status, state: State) -> HandlerResult:
        if device in state.devices:
            return HandlerResult(events=(states.DeviceStatus(device, status.online),))
        self._rate_limiter.set_presence(device, online=status.online)
        return NOTHING

    def _decline(self, device: str, decline: messages.Decline, state: State) -> HandlerResult:
        """Journal that a device declined its task, and return the events for the coordinator.

        Declines of tasks that are over are ignored, except that the device counts as online.
        """
        online = HandlerResult(events=_online_event(device, state))
        current = state.round
        if current is None or not current.version_of(decline.round) or device not in current.assignments:
            return online
        if current.buffered and current.assignments[device].nonce != decline.nonce:
            return online  # the declined task is over, and the device has another one
        try:
            task = find_task(state, device, decline.round, decline.nonce)
        except UpdateRejected as refusal:
            if self._rate_limiter.allow("answer", device):
                text = printable(refusal.message)
                refused = events.Rejected(
                    device=device, round=current.number, reason=refusal.reason, text=text
                )
                self._reporter.emit(refused)
            return online
        if task.status != "open":
            return online
        bundle = self._spec.exchange(current.position).tiers[task.tier].bundle
        reason, text = decline_reason(decline, carry_needed=bundle.manifest.carry_needed)
        try:
            self._journal.decline(self._spec.rules.run, task, reason)
        except StoreError as error:  # a restarted server sends the task again, and the device declines again
            self._reporter.report_storage_error(error)
        self._reporter.emit(
            events.ParticipationDeclined(device=device, round=task.round, reason=reason, text=text)
        )
        return HandlerResult(events=(*online.events, states.TaskDeclined(device, task.nonce, reason)))

    # -- refusals --------------------------------------------------------------------------------------------

    def _offline_event(self, device: str, state: State) -> tuple[states.Event, ...]:
        """Return an event that takes a known device offline if it has no valid key any more, else no event.

        Such a device cannot sign a status itself.
        """
        known = state.devices.get(device)
        if known is None or known == roster.gone(known):
            return ()
        try:
            if self._authenticator.is_barred(device):
                return (states.DeviceStatus(device, online=False, for_good=True),)
        except StoreError as error:
            self._reporter.report_storage_error(error)
        return ()

    def _object(
        self, device: str, reason: str, text: str, state: State, is_verified: bool = True
    ) -> tuple[Reply, ...]:
        """Report an invalid message that is not an update, and return the reply that rejects it.

        No report and no reply if the rate limit does not allow them. ``is_verified``: the device signed the message.
        """
        kind: RateKind = "answer" if is_verified else "unverified"
        if not self._rate_limiter.allow(kind, device, is_known=device in state.devices):
            return ()
        self._reporter.emit(events.Rejected(device=device, round=0, reason=reason, text=text))
        if device == _UNKNOWN:
            return ()
        ack = messages.Ack(round=0, nonce="", status="rejected", reason=reason, text=text[:MOST_TEXT])
        return (Reply(device, ack),)


def _online_event(device: str, state: State) -> tuple[states.Event, ...]:
    """Return an event that brings a device online if it is known as offline, else no event.

    The broker may report a device offline that still sends messages.
    """
    known = state.devices.get(device)
    return (states.DeviceStatus(device, online=True),) if known is not None and not known.online else ()


def tier_objection(rules: Rules, device: str, hello: messages.Hello) -> tuple[str, str] | None:
    """Return (reason code, text for people) if a device fits no tier, or if its hello requests another tier than it gets.

    Return None if there is no objection.
    """
    tier = roster.tier_of(rules.tiers, device, hello.memory_bytes)
    known = {rule.name for rule in rules.tiers}
    there_are = f"there are {roster.describe_tiers(rules.tiers)}"
    wish = repr(printable(hello.tier, MAX_NAME))
    given = f"device {device} is given {tier!r}, by its name and memory"
    if not tier:
        memory = mebibytes(hello.memory_bytes)
        reason = "no-tier"
        text = f"device {device} fits no tier by its name or its {memory} of memory, and takes part in no round; {there_are}"
    elif hello.tier and hello.tier not in known:
        reason, text = "unknown-tier", f"no tier is called {wish}; {there_are}; {given}"
    elif hello.tier not in ("", tier):
        reason = "wrong-tier"
        text = (
            f"device {device} asks for tier {wish} and is given {tier!r}, by its name and memory; {there_are}"
        )
    else:
        return None
    return reason, text
