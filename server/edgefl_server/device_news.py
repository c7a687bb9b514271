"""What the server tells people of single devices: who came and went, why one has not the tier it asked for, whose attempts
fail, and whom a round waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from edgefl.errors import ProtocolError, StoreError
from edgefl.system.sizes import mebibytes
from edgefl.wire.mqtt.messages import FAILED, Ack, Hello, Progress
from edgefl.wire.mqtt.reasons import TEXTS
from edgefl.wire.text import MOST_TEXT, printable
from edgefl_server import events
from edgefl_server.coordinator import attendance, roster
from edgefl_server.coordinator.states import OpenRound, Rules, State

# What the server tells of floods and full disks: now and then, however often they are met.

_TOLD_AGAIN_S = 60.0


class LoadNews:
    """Times are those of the service's clock."""

    def __init__(self, notice_s: float, emit: Callable[[events.Event], None]) -> None:
        self._notice_s = notice_s
        self._emit = emit
        self._counts: Mapping[str, int] = {}
        self._next = 0.0
        self._trouble = ("", 0.0)

    def step(self, counts: Mapping[str, int], now: float) -> float | None:
        """Tell ``counts`` of messages turned away, if there are more and it is time. Seconds until it is; None if there is
        nothing to tell."""
        if counts == self._counts:
            return None
        if now < self._next:
            return self._next - now
        self._counts, self._next = counts, now + self._notice_s
        self._emit(events.Limited(counts=dict(counts)))
        return None

    def troubled(self, error: StoreError, now: float) -> None:
        """The disk is full, or its like: told once for as long as it stays so, as it is tried again and again."""
        text, at = self._trouble
        if error.message == text and now - at < _TOLD_AGAIN_S:
            return
        self._trouble = error.message, now
        text = f"{error.message}; nothing is acknowledged that is not written, and the server tries again"
        self._emit(events.Warned(tier="", text=text))


_MOST_NAME = 64
_GREETINGS = 4
_GREETINGS_S = 10.0
"""So many hellos of one device in that time: its connections do not stand."""
_MOST_FAILURES = 1000
"""Reasons of failed attempts that are told in a round."""


def objection(rules: Rules, device: str, hello: Hello) -> events.Rejected | None:
    """Why a device has no tier, or not the one that it asks for; None where there is nothing to say."""
    tier = roster.tier_of(rules.tiers, device, hello.memory_bytes)
    known = {rule.name for rule in rules.tiers}
    there_are = f"there are {roster.described(rules.tiers)}"
    wish = repr(printable(hello.tier, _MOST_NAME))
    if not tier:
        memory = mebibytes(hello.memory_bytes)
        text = f"device {device} fits no tier by its name or its {memory} of memory, and takes part in no round; {there_are}"
        return events.Rejected(device=device, round=0, reason="no-tier", text=text)
    given = f"device {device} is given {tier!r}, by its name and memory"
    if hello.tier and hello.tier not in known:
        text = f"no tier is called {wish}; {there_are}; {given}"
        return events.Rejected(device=device, round=0, reason="unknown-tier", text=text)
    if hello.tier not in ("", tier):
        text = (
            f"device {device} asks for tier {wish} and is given {tier!r}, by its name and memory; {there_are}"
        )
        return events.Rejected(device=device, round=0, reason="wrong-tier", text=text)
    return None


def ack_of(refused: events.Rejected) -> Ack:
    """The same word to the device, about its hello or a message that cannot be read: no round, no nonce."""
    return Ack(round=0, nonce="", status="rejected", reason=refused.reason, text=refused.text[:MOST_TEXT])


class DeviceNews:
    """Remembers what was heard of each device, and says what is new to ``emit``. Times are epoch seconds."""

    def __init__(self, rules: Rules, notice_s: float, emit: Callable[[events.Event], None]) -> None:
        self._rules = rules
        self._notice_s = notice_s
        self._emit = emit
        self._heard: dict[str, tuple[float, str]] = {}
        self._failures: set[tuple[str, int, str]] = set()
        self._failed_round = 0
        self._greetings: dict[str, tuple[float, ...]] = {}
        self._answers = (0, 0)
        self._pause = notice_s
        self._next = 0.0

    def reconnected(self) -> None:
        """The server's own connection stands again: hellos that are retained come once more."""
        self._greetings.clear()

    def greeted(self, device: str, now: float) -> None:
        """A hello came. Those that come one after the other are told once."""
        times = self._greetings.get(device, ())
        if len(times) == _GREETINGS:
            return  # told
        times = (*times, now)
        quick = times[-1] - times[0] <= _GREETINGS_S
        if len(times) == _GREETINGS and quick:
            text = (
                f"device {device} connected {_GREETINGS} times within {now - times[0]:.0f} s: either two devices run under "
                "this name and take each other's place at the broker, or its link breaks; "
                "give each its own name (`edgefl device --id`)"
            )
            self._emit(events.Warned(tier="", text=text))
        self._greetings[device] = times if quick or len(times) < _GREETINGS else times[1:]

    def progress(self, device: str, tier: str, progress: Progress, now: float) -> None:
        """A device of ``tier`` says where it stands, or that an attempt failed. ProtocolError if it says what is for the
        server to say."""
        if progress.stage.startswith(FAILED):
            code = printable(progress.stage.removeprefix(FAILED))
            self._failed(device, progress.round, TEXTS.get(code, code))
            return
        fields = msgspec.structs.asdict(progress)
        fields.pop("v")
        fields |= {"tier": tier, "stage": printable(progress.stage, _MOST_NAME)}
        if fields["stage"].strip() == events.REPORTED:
            raise ProtocolError(
                "a device says by its update that it reported, and not by the stage of a Progress message"
            )
        done = f" {progress.step}/{progress.steps}" if progress.steps else ""
        self.heard(device, f"{fields['stage']}{done}", now)
        self._emit(events.DeviceSeen(device=device, **fields))

    def heard(self, device: str, stage: str, now: float) -> None:
        """A device does something for its round."""
        self._heard[device] = now, stage

    def _failed(self, device: str, number: int, reason: str) -> None:
        """An attempt at a round failed. Each reason is told once for a round, however often it is tried again."""
        if number != self._failed_round:
            self._failed_round, self._failures = number, set()
        if (device, number, reason) not in self._failures and len(self._failures) < _MOST_FAILURES:
            self._failures.add((device, number, reason))
            self._emit(events.DeviceFailed(device=device, round=number, text=reason))

    def changed(self, before: State, state: State, name: str) -> None:
        """A device's presence or tier may be another than before."""
        was, device = before.devices.get(name), state.devices.get(name)
        if device is None or device is was or state.phase == "done":
            return
        there, was_there = (
            device.online and bool(device.tier),
            was is not None and was.online and bool(was.tier),
        )
        if there and not was_there:
            self._emit(events.DeviceJoined(device=name, tier=device.tier))
        if there and device.unfit != (was.unfit if was is not None else ""):
            self._emit(events.DeviceFitness(device=name, tier=device.tier, unfit=device.unfit))
        if was_there and not device.online:
            number, until = self._patience(state, name)
            self._emit(events.DeviceLost(device=name, tier=device.tier, round=number, until=until))

    def _patience(self, state: State, name: str) -> tuple[int, float]:
        """The round that waits for a device that is away, and until when."""
        current = state.round if state.phase == "open" else None
        assignment = current.assignments.get(name) if current is not None else None
        if current is None or assignment is None or assignment.status != "open":
            return 0, 0.0
        until = attendance.away_until(self._rules, state, current, name)
        return current.number, min(current.deadline, until or current.deadline)

    def step(self, state: State, now: float) -> float | None:
        """Tell whom the round waits for, if it is time. Seconds until it is next; None while no round is open."""
        current = state.round if state.phase == "open" else None
        if current is None:
            return None
        pending = current.count("open")
        if self._answers != (current.number, pending):
            self._answers, self._pause = (current.number, pending), self._notice_s
            self._next = now + self._pause
        elif now >= self._next:
            self._pause *= 2
            self._next = now + self._pause
            self._emit(self._awaiting(state, current))
        return self._next - now

    def _awaiting(self, state: State, current: OpenRound) -> events.Awaiting:
        names = [assignment.device for assignment in current.with_status("open")]
        given_up = None if current.buffered else attendance.given_up_at(self._rules, state, current)
        until = current.deadline if given_up is None else min(given_up, current.deadline)
        devices = tuple(self._awaited(state, current, name) for name in names)
        return events.Awaiting(round=current.number, devices=devices, until=until)

    def _awaited(self, state: State, current: OpenRound, name: str) -> events.AwaitedDevice:
        device = state.devices.get(name)
        at, stage = self._heard.get(name, (0.0, ""))
        if at < current.opened:
            at, stage = 0.0, ""
        online = device is not None and device.online
        since = at if online or device is None else device.seen
        return events.AwaitedDevice(device=name, online=online, stage=stage, since=since)
