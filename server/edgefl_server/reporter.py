"""Reporter of events to people. It limits repetition: each fact is reported once, or at intervals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from edgefl.errors import ProtocolError, StoreError
from edgefl.system.clock import Clock
from edgefl.wire.mqtt.events import Disconnected
from edgefl.wire.mqtt.messages import FAILED, Progress, Round, encode
from edgefl.wire.mqtt.neighbours import Neighbours, list_devices
from edgefl.wire.mqtt.reasons import TEXTS
from edgefl.wire.text import printable
from edgefl_server import events
from edgefl_server.aggregate.robust import unprotected
from edgefl_server.coordinator import attendance
from edgefl_server.coordinator.attendance import Presence
from edgefl_server.coordinator.rollout import Trial
from edgefl_server.coordinator.roster import CANDIDATE
from edgefl_server.coordinator.states import OpenRound, Outcome, State
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.run_spec import RunSpec

HOSTED_BYTES = 128 * 1024
"""Largest message of the strictest hosted brokers."""
MAX_NAME = 64
_STORAGE_ERROR_S = 60.0
"""Seconds between two reports of the same storage error."""
_HELLOS = 4
_HELLOS_S = 10.0
"""Time in which several hellos of one device mean that its connections break."""
_MAX_FAILURES = 1000
"""Largest number of failed attempts that are reported in a round."""
_ONE_OF_MANY = re.compile(r"(?<=/devices/)[^/]+|(?<=/blobs/).*")
"""Parts of a topic that differ between devices and blobs."""


class EventReporter:
    """Reporter of the events of one server, which remembers what it has reported.

    Args:
        spec: Specification of the run.
        listener: Receives the events.
        memory_plans: Memory plans of the tiers, which are updated by the peaks that devices report.
        clock: Epoch seconds.

    Attributes:
        is_open: False once the pipe of the listener is closed.
    """

    def __init__(
        self,
        spec: RunSpec,
        listener: events.EventListener,
        memory_plans: MemoryPlans,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._memory_plans = memory_plans
        self._clock = clock
        self.is_open = True
        self._notice_s = spec.limits.notice_s
        # The run and the broker.
        self._is_offline = False
        self._denied: set[str] = set()
        self._strangers: dict[str, Sequence[str]] = {}
        self._counts: Mapping[str, int] = {}
        self._counts_at = 0.0
        self._storage_error = ("", 0.0)
        # Rounds.
        self._presence: Presence | None = None
        self._unprotected: set[tuple[str, int]] = set()
        self._open_tasks = (0, 0)
        self._pause_s = self._notice_s
        self._awaiting_at = 0.0
        # Devices.
        self._newcomers: set[str] = set()
        self._hellos: dict[str, tuple[float, ...]] = {}
        self._stages: dict[str, tuple[float, str]] = {}
        self._failures: set[tuple[str, int, str]] = set()
        self._failed_round = 0

    def emit(self, event: events.Event) -> None:
        """Pass an event to the listener.

        An exception of the listener is ignored. A broken pipe sets :attr:`is_open` to False, which ends the run.
        """
        try:
            self._listener.emit(event)
            if isinstance(event, events.DeviceSeen) and event.stage == events.REPORTED:
                warning = self._memory_plans.report(event)
                if warning is not None:
                    self._listener.emit(warning)
        except BrokenPipeError:
            self.is_open = False
        except Exception:
            return  # the fault is the listener's, and nothing else could receive it

    def _warn(self, text: str, tier: str = "") -> None:
        self.emit(events.Warned(tier=tier, text=text))

    # -- the run and the broker ------------------------------------------------------------------------------

    def report_start(self, state: State, *, resumed: bool, device: str, server_key: str) -> None:
        """Emit the event that the server has started.

        Args:
            state: State of the coordinator.
            resumed: True if an earlier process began the run.
            device: Processor that sums updates.
            server_key: Public key of the server.
        """
        started = events.Started(
            federation=self._spec.federation,
            run=self._spec.rules.run,
            rounds=self._spec.rules.last_round,
            next_round=state.next_round,
            resumed=resumed,
            model_version=state.model_version,
            device=device,
            server_key=server_key,
        )
        self.emit(started)

    def check_announcement(self, message: Round | None) -> None:
        """Emit a warning if the announcement is so large that hosted brokers would refuse it.

        Does nothing if ``message`` is None or the broker's limit is known.
        """
        size = len(encode(message)) if message is not None else 0
        if not self._spec.message_limit and size > HOSTED_BYTES:
            self._warn(
                f"the announcement of a round takes {size} bytes; this broker has to take as much in a message, and hosted "
                f"ones take {HOSTED_BYTES}: fewer units or tiers make it smaller"
            )

    def report_denied(self, topic: str, text: str) -> None:
        """Emit a warning with ``text`` because the broker denies ``topic``; once per kind of topic.

        The session tries again, because the broker's administrator may grant the right.
        """
        kind = _ONE_OF_MANY.sub("", topic)
        if kind not in self._denied:
            self._denied.add(kind)
            self._warn(text)

    def report_offline(self, event: Disconnected) -> None:
        """Report that the connection to the broker was lost. The next :meth:`report_online` reports its return."""
        self._is_offline = True
        rival = f"another client takes this server's place: does a second server of {self._spec.federation!r} run?"
        self.emit(events.Offline(text=rival if event.rival else event.reason, retry_s=event.retry_s))

    def report_online(self, broker: str) -> None:
        """Emit the event that the broker is connected again, if the loss of the connection was reported.

        The counts of hellos are reset, because the broker delivers all retained hellos again.
        """
        self._hellos.clear()
        if self._is_offline:
            self._is_offline = False
            self.emit(events.Online(broker=broker))

    def report_refused(self, counts: Mapping[str, int]) -> float | None:
        """Emit an event with the numbers of messages that were not read, if they changed and the last event is old
        enough.

        Args:
            counts: Numbers of messages since the start, by reason.

        Returns:
            Seconds until the next report is due; None if there is nothing new.
        """
        now = self._clock()
        if counts == self._counts:
            return None
        if now < self._counts_at:
            return self._counts_at - now
        self._counts, self._counts_at = counts, now + self._notice_s
        self.emit(events.Limited(counts=dict(counts)))
        return None

    def report_storage_error(self, error: StoreError) -> None:
        """Emit a warning about a storage error that is retried. The same error is reported once a minute."""
        text, at = self._storage_error
        now = self._clock()
        if error.message == text and now - at < _STORAGE_ERROR_S:
            return
        self._storage_error = error.message, now
        self._warn(
            f"{error.message}; nothing is acknowledged that is not written, and the server tries again"
        )

    def report_neighbours(self, state: State, neighbours: Neighbours) -> None:
        """Emit a warning about devices at this broker whose federation has no server: they may have a wrong federation
        name.

        It is emitted while this run waits for devices, again if they change.
        """
        name = self._spec.federation
        strangers = neighbours.unserved(but=name)
        if not strangers or strangers == self._strangers or state.phase != "waiting":
            return
        self._strangers = strangers
        names = list_devices([f"{each!r} ({list_devices(devices)})" for each, devices in strangers.items()])
        self._warn(
            f"at this broker devices wait for a server of federation {names}; those that are meant for this one want "
            f"`edgefl device --federation {name}`"
        )

    # -- rounds ----------------------------------------------------------------------------------------------

    @property
    def lacks_devices(self) -> bool:
        """True if the next round waits for devices."""
        return self._presence is not None and self._presence.known < self._presence.needed

    def report_waiting(self, state: State) -> None:
        """Emit an event with the devices that are present and missing for the next round, if they changed since the
        last call.
        """
        if state.phase != "waiting":
            self._presence = None
            return
        presence = attendance.presence(self._spec.rules, state, self._clock())
        is_waiting = presence.known < presence.needed and state.next_round <= self._spec.rules.last_round
        if is_waiting and presence != self._presence:
            self._presence = presence
            self.emit(events.Waiting(next_round=state.next_round, **vars(presence)))

    def report_opened(self, opened: OpenRound, trial: Trial | None) -> None:
        """Emit the event of a round that opened, and of a trial of a candidate bundle that began with it.

        Also warn about tiers with too few devices for a robust rule.
        """
        event = events.RoundOpened(
            round=opened.number,
            goal=opened.goal,
            devices=tuple(opened.assignments),
            deadline=opened.deadline,
            evaluates=opened.evaluates,
            measures=opened.measures,
        )
        self.emit(event)
        holders = Counter(assignment.tier for assignment in opened.assignments.values())
        if trial is not None and trial.began == opened.number:
            devices = {tier: holders[tier + CANDIDATE] for tier in trial.marks}
            self.emit(events.RolloutStarted(round=opened.number, devices=devices))
        rule = self._spec.aggregate.rule
        for tier, count in sorted(holders.items()):
            if unprotected(rule, count) and (tier, count) not in self._unprotected:
                self._unprotected.add((tier, count))
                self._warn(
                    f"the rule {rule.name} leaves nothing out of {count} updates of tier {tier!r}; raise aggregate.trim, or "
                    "give the tier more devices",
                    tier,
                )

    def report_awaited(self, state: State) -> float | None:
        """Report the devices that the open round waits for, at growing intervals without an update.

        Returns:
            Seconds until the next report; None while no round is open.
        """
        current = state.round if state.phase == "open" else None
        if current is None:
            return None
        now, pending = self._clock(), current.count("open")
        if self._open_tasks != (current.number, pending):
            self._open_tasks, self._pause_s = (current.number, pending), self._notice_s
            self._awaiting_at = now + self._pause_s
        elif now >= self._awaiting_at:
            self._pause_s *= 2
            self._awaiting_at = now + self._pause_s
            given_up = None if current.buffered else attendance.given_up_at(self._spec.rules, state, current)
            until = current.deadline if given_up is None else min(given_up, current.deadline)
            devices = tuple(
                self._awaited_device(state, current, task.device) for task in current.with_status("open")
            )
            self.emit(events.Awaiting(round=current.number, devices=devices, until=until))
        return self._awaiting_at - now

    def _awaited_device(self, state: State, current: OpenRound, name: str) -> events.AwaitedDevice:
        device = state.devices.get(name)
        at, stage = self._stages.get(name, (0.0, ""))
        if at < current.opened:
            at, stage = 0.0, ""
        online = device is not None and device.online
        since = at if online or device is None else device.seen
        return events.AwaitedDevice(device=name, online=online, stage=stage, since=since)

    def report_ended(self, state: State, ended: OpenRound, outcome: Outcome, text: str, now: float) -> None:
        """Report a round that receives no more updates.

        Args:
            state: State of the coordinator.
            ended: The round.
            outcome: ``closed`` or ``abandoned``.
            text: Reason of an abandoned round.
            now: Time of its last update.
        """
        event = events.RoundEnded(
            round=ended.number,
            outcome=outcome,
            reports=ended.count("accepted"),
            missing=attendance.find_missing(self._spec.rules, state, ended, now),
            seconds=now - ended.opened,
            text=text,
            evaluates=ended.evaluates,
        )
        self.emit(event)

    def report_trial(self, number: int, trial: Trial) -> None:
        """Report the verdict on a candidate bundle, if round ``number`` led to one."""
        if trial.verdict:
            promoted = trial.verdict == "promoted"
            self.emit(events.RolloutJudged(round=number, promoted=promoted, text=trial.text))

    # -- devices ---------------------------------------------------------------------------------------------

    def report_newcomer(self, state: State, device: str) -> None:
        """Emit a warning, once per device, if it joined after an algorithm that needs all devices began.

        Such a device is not selected before the algorithm begins again.
        """
        tier = state.devices[device].tier
        if not tier or not state.members or device in state.members or device in self._newcomers:
            return
        self._newcomers.add(device)
        self._warn(
            f"device {device} came after the method began and has nothing of its earlier rounds, which the algorithm needs; "
            "it takes part if the method begins again",
            tier,
        )

    def count_hello(self, device: str) -> None:
        """Count a hello of a device, and emit a warning once if the device reconnects often in a short time."""
        times = self._hellos.get(device, ())
        if len(times) == _HELLOS:
            return
        times = (*times, self._clock())
        is_quick = times[-1] - times[0] <= _HELLOS_S
        if len(times) == _HELLOS and is_quick:
            self._warn(
                f"device {device} connected {_HELLOS} times within {times[-1] - times[0]:.0f} s: either two devices run "
                "under this name and take each other's place at the broker, or its link breaks; "
                "give each its own name (`edgefl device --id`)"
            )
        self._hellos[device] = times if is_quick or len(times) < _HELLOS else times[1:]

    def report_progress(self, device: str, tier: str, progress: Progress) -> None:
        """Emit an event with a device's progress or failed attempt in its round.

        Raises:
            ProtocolError: If the device uses the stage that only the server sets.
        """
        if progress.stage.startswith(FAILED):
            code = printable(progress.stage.removeprefix(FAILED))
            self._report_failure(device, progress.round, TEXTS.get(code, code))
            return
        fields = msgspec.structs.asdict(progress)
        fields.pop("v")
        fields |= {"tier": tier, "stage": printable(progress.stage, MAX_NAME)}
        if fields["stage"].strip() == events.REPORTED:
            raise ProtocolError(
                "a device says by its update that it reported, and not by the stage of a Progress message"
            )
        if fields["stage"] == "train" and self._spec.rules.is_evaluation(progress.round):
            fields["stage"] = "evaluate"  # devices run the same loop, also to measure statistics
        done = f" {progress.step}/{progress.steps}" if progress.steps else ""
        self.note_stage(device, f"{fields['stage']}{done}")
        self.emit(events.DeviceSeen(device=device, **fields))

    def note_stage(self, device: str, stage: str) -> None:
        """Store the stage of a device in its round, for :meth:`report_awaited`."""
        self._stages[device] = self._clock(), stage

    def _report_failure(self, device: str, number: int, reason: str) -> None:
        """Emit an event about a failed attempt of a device. The same reason is reported once a round, however often it
        happens.
        """
        if number != self._failed_round:
            self._failed_round, self._failures = number, set()
        if (device, number, reason) not in self._failures and len(self._failures) < _MAX_FAILURES:
            self._failures.add((device, number, reason))
            self.emit(events.DeviceFailed(device=device, round=number, text=reason))

    def report_change(self, before: State, state: State, name: str) -> None:
        """Emit events if a device came online, went offline, or reported other conditions.

        Args:
            before: State of the coordinator before the device's message.
            state: State after it.
            name: Name of the device.
        """
        previous, device = before.devices.get(name), state.devices.get(name)
        if device is None or device is previous or state.phase == "done":
            return
        is_present = device.online and bool(device.tier)
        was_present = previous is not None and previous.online and bool(previous.tier)
        if is_present and not was_present:
            self.emit(events.DeviceJoined(device=name, tier=device.tier))
        if is_present and device.unfit != (previous.unfit if previous is not None else ""):
            self.emit(events.DeviceFitness(device=name, tier=device.tier, unfit=device.unfit))
        if was_present and not device.online:
            number, until = self._grace(state, name)
            self.emit(events.DeviceLost(device=name, tier=device.tier, round=number, until=until))

    def _grace(self, state: State, name: str) -> tuple[int, float]:
        """Return (number of the round that waits for the offline device ``name``, epoch second until which it waits).

        It is (0, 0.0) if no round waits for it.
        """
        current = state.round if state.phase == "open" else None
        task = current.assignments.get(name) if current is not None else None
        if current is None or task is None or task.status != "open":
            return 0, 0.0
        until = attendance.away_until(self._spec.rules, state, current, name)
        return current.number, min(current.deadline, until or current.deadline)
