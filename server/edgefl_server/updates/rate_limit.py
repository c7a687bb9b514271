"""Rate limits of incoming messages, and admission of devices if there are more than the server takes.

Device names come from topics, so any client of the broker can invent them. For names without a hello the server
stores one bit, online or offline, for a bounded number of names, and all such names share one rate. A device that
sent a hello has rates of its own. Refused messages are counted.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from edgefl.system.clock import Clock
from edgefl.wire.limits import Limits
from edgefl_server.coordinator.states import State

MAX_SIZES = {"status": 1024, "progress": 4096, "declines": 16_384}
"""Largest message by the last level of its topic, in bytes; hellos have a limit of their own."""
_BURST_S = 10.0
"""Seconds of unused messages that a device may send at once later."""
_ANSWERS_S = 2.0
_ANSWERS_BURST = 32.0
"""Number of answers to one device's unreadable messages and unrequested updates at once."""
RETURNS_S = 10.0
"""Number of devices without a place that are asked to return per second."""

RateKind = Literal["message", "answer", "unverified", "copy"]
"""Purpose of a rate: ``message``, a device's message other than a chunk; ``answer``, an answer to a signed message;
``unverified``, an answer to a message that anyone may have sent; ``copy``, an answer to a copy of a chunk. They
are separate so that an attacker cannot use up the rates that the device itself needs."""

_REFUSED: dict[RateKind, str] = {
    "message": "messages too often",
    "answer": "objections too often",
    "unverified": "objections too often",
    "copy": "copies too often",
}


class TokenBuckets:
    """Token buckets by name, which limit how often something may happen. A new name has a full bucket.

    A bucket that was not used for the time that it takes to fill is full again, and is forgotten after at most twice
    that time.

    Args:
        rate: Tokens a second.
        burst: Capacity of a bucket.
        clock: Seconds, never set back.
    """

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        self._previous: dict[str, tuple[float, float]] = {}
        self._since = clock()

    def allow(self, name: str) -> bool:
        """Take a token from the bucket of ``name`` and return True. Return False if it has none."""
        now = self._clock()
        if (now - self._since) * self._rate > self._burst:
            self._levels, self._previous, self._since = {}, self._levels, now
        level, at = self._levels.get(name) or self._previous.get(name) or (self._burst, now)
        level = min(self._burst, level + self._rate * (now - at))
        self._levels[name] = (level - 1.0 if level >= 1.0 else level, now)
        return level >= 1.0

    def __len__(self) -> int:
        """Return the number of names whose buckets are in memory."""
        return len(self._levels.keys() | self._previous.keys())


class RateLimiter:
    """Limits of a server's or worker's incoming messages by size and by rate, and of its answers by rate.

    Args:
        limits: Limits of the federation.
        clock: Seconds, never set back.

    Attributes:
        counts: Messages that were not read, stored or answered, by reason.
    """

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self.counts: Counter[str] = Counter()
        messages, strangers = limits.device_messages_s, limits.stranger_messages_s
        self._buckets: dict[RateKind, TokenBuckets] = {
            "message": TokenBuckets(messages, max(1.0, messages * _BURST_S), clock),
            "answer": TokenBuckets(_ANSWERS_S, _ANSWERS_BURST, clock),
            "unverified": TokenBuckets(_ANSWERS_S, _ANSWERS_BURST, clock),
            "copy": TokenBuckets(_ANSWERS_S, _ANSWERS_BURST, clock),
        }
        self._strangers = TokenBuckets(strangers, max(1.0, strangers * _BURST_S), clock)
        self._progress = TokenBuckets(limits.progress_messages_s, 2 * limits.progress_messages_s, clock)
        self._online: OrderedDict[str, bool] = OrderedDict()

    def accepts(self, device: str, leaf: str, size: int, *, is_known: bool, devices: int) -> bool:
        """Return True if the server should read a message, otherwise count it. Called before any of it is decoded.

        Args:
            device: Name in the topic.
            leaf: Kind of the message, from the topic.
            size: Bytes of the payload.
            is_known: True if the device sent a hello before, or is on the list of devices.
            devices: Number of known devices.
        """
        reason = self._refusal(leaf, size, is_known=is_known, devices=devices)
        if reason:
            self.counts[reason] += 1
        return not reason

    def _refusal(self, leaf: str, size: int, *, is_known: bool, devices: int) -> str:
        if size > (self._limits.hello_bytes if leaf == "hello" else MAX_SIZES.get(leaf, size)):
            return f"{leaf} too large"
        # Progress is for people, who cannot read a thousand lines a second: all devices share one rate.
        if leaf == "progress" and not self._progress.allow(""):
            return "progress too often"
        if is_known or leaf == "status":
            return ""
        if leaf == "hello":
            return "" if devices < self._limits.max_devices else "too many devices"
        return "" if self._strangers.allow("") else "unknown names"

    def allow(self, kind: RateKind, device: str, *, is_known: bool = True) -> bool:
        """Return True if a device's rate of this ``kind`` has a token, and take it. Otherwise count the refusal.

        Chunks of updates have no rate: :class:`~edgefl_server.updates.receiver.UpdateReceiver` limits their bytes.

        Args:
            kind: Rate to use.
            device: Name in the topic.
            is_known: False for a name without a hello. All such names share one rate of answers.
        """
        allowed = (
            self._buckets[kind].allow(device) if is_known else kind == "message" or self._strangers.allow("")
        )
        if not allowed:
            self.counts[_REFUSED[kind]] += 1
        return allowed

    def set_presence(self, device: str, *, online: bool) -> None:
        """Store the presence (online or offline) of a device before its first hello.

        If too many such names are stored, the oldest is forgotten.
        """
        self._online.pop(device, None)
        self._online[device] = online
        if len(self._online) > self._limits.max_strangers:
            self._online.popitem(last=False)
            self.counts["unknown names"] += 1

    def take_presence(self, device: str) -> bool:
        """Return True if a device whose first hello arrived is online, and forget what :meth:`set_presence` stored for
        it.

        True if nothing was stored.
        """
        return self._online.pop(device, True)


@dataclass(frozen=True)
class AdmissionDecision:
    """Decision about the admission of one device to a run, which takes a limited number of devices.

    Attributes:
        is_admitted: True if the device is admitted.
        replaces: Device that must be removed for it; empty if the limit was not reached.
    """

    is_admitted: bool
    replaces: str = ""


class AdmissionControl:
    """Lottery that decides which devices are admitted, if more of the enrolled ones connect than the server takes.

    Each name has a lot number computed from the federation's seed. The lowest numbers are admitted, so the order of
    arrival does not matter. A device that has had a task stays admitted. The others are asked to return later, spread
    over a time that grows with their number. If devices need not be enrolled there is no lottery, because it would
    favour whoever invents more names: see :class:`RateLimiter`.

    Args:
        seed: Seed of the federation.
        limits: Limits of the federation.
    """

    def __init__(self, seed: int, limits: Limits) -> None:
        self._seed = seed
        self._places = limits.max_devices
        self._min_wait_s = limits.come_later_s
        self._max_refused = limits.max_strangers
        self._highest: list[tuple[int, str]] | None = None
        """Heap of the devices with a place, the highest lot first; None while there was room for all."""
        self._refused: OrderedDict[str, int] = OrderedDict()

    def lot(self, name: str) -> int:
        """Return the lot number of a device name, from 0 to 2**64 - 1. The devices with the lowest numbers are admitted."""
        digest = hashlib.sha256(f"admit/{self._seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def decide(self, name: str, state: State) -> AdmissionDecision:
        """Decide if a device that is not in ``state`` is admitted, though the number of devices is limited.

        The caller adds the device to the state, and removes the device that the decision replaces.
        """
        decision = self._decision(name, state)
        if decision.is_admitted:
            self._refused.pop(name, None)
        return decision

    def _decision(self, name: str, state: State) -> AdmissionDecision:
        entry = (-self.lot(name), name)
        if len(state.devices) < self._places:
            if self._highest is not None:
                heapq.heappush(self._highest, entry)
            return AdmissionDecision(True)
        if self._highest is None:
            self._highest = [(-self.lot(each), each) for each in state.devices]
            heapq.heapify(self._highest)
        highest = self._highest
        while highest and not _is_replaceable(state, highest[0][1]):
            heapq.heappop(highest)
        if not highest or highest[0] > entry:
            return AdmissionDecision(False)
        return AdmissionDecision(True, heapq.heapreplace(highest, entry)[1])

    def retry_after_s(self, name: str) -> float:
        """Return the seconds after which a refused device should send its hello again.

        The time differs from call to call: it depends on the number of refused devices and on the device's refusals so
        far.
        """
        times = self._refused.pop(name, 0) + 1
        self._refused[name] = times
        if len(self._refused) > self._max_refused:
            self._refused.popitem(last=False)
        window = max(self._min_wait_s, len(self._refused) / RETURNS_S)
        jitter = hashlib.sha256(f"later/{self._seed}/{name}/{times}".encode()).digest()[0] / 256
        return window * (1.0 + jitter)

    def select_admitted(self, state: State, names: Iterable[str]) -> Collection[str]:
        """Return those of ``names`` that stay admitted when a server restarts with a lower limit of devices.

        Devices that had a task come first, then the lowest lot numbers.
        """
        ranked = sorted(names, key=lambda name: (_is_replaceable(state, name), self.lot(name)))
        return frozenset(ranked[: self._places])


def _is_replaceable(state: State, name: str) -> bool:
    """Return True if the device is admitted and never had a task, so that another one may be admitted instead."""
    tasks = state.round.assignments if state.round is not None else {}
    return name in state.devices and name not in state.record.of and name not in tasks
