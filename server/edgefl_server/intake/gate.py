"""Who is heard, and how often: asked of each message before anything of it is decoded or kept.

Names of devices come from topics, and whoever may write to the broker can make them up. So the server keeps nothing of a
name that said no hello but whether it is online, in bounded number, and answers such names so many times a second in all.
A device that said hello has a share of its own. Whatever is turned away is counted.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from edgefl.wire.limits import Limits

STATUS_BYTES = 1024
PROGRESS_BYTES = 4096
DECLINE_BYTES = 16_384
_SIZES = {"status": STATUS_BYTES, "progress": PROGRESS_BYTES, "declines": DECLINE_BYTES}
_AT_ONCE_S = 10.0
"""A share that was not used is saved up for so long."""
_OBJECTIONS_S = 2.0
_OBJECTIONS_AT_ONCE = 32.0
"""Of one device: messages that cannot be read, and updates that nobody asked for, that are answered and told."""


class Shares:
    """Token buckets by name. ``allow`` takes one; a name that was never heard has all that it may save up.

    So has one that was not heard for as long as saving takes: those are forgotten, a generation at a time.
    """

    def __init__(self, rate: float, most: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._most = most
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._earlier: dict[str, tuple[float, float]] = {}
        self._since = clock()

    def allow(self, name: str) -> bool:
        now = self._clock()
        if (now - self._since) * self._rate > self._most:
            self._left, self._earlier, self._since = {}, self._left, now
        left, at = self._left.get(name) or self._earlier.get(name) or (self._most, now)
        left = min(self._most, left + self._rate * (now - at))
        self._left[name] = (left - 1.0 if left >= 1.0 else left, now)
        return left >= 1.0

    def __len__(self) -> int:
        """Names that are remembered."""
        return len(self._left.keys() | self._earlier.keys())


class Gate:
    """One for a server. ``counts``: messages that were turned away, by why. ``clock`` is in seconds, and never set back."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self.counts: Counter[str] = Counter()
        messages, strangers = limits.device_messages_s, limits.stranger_messages_s
        self._messages = Shares(messages, max(1.0, messages * _AT_ONCE_S), clock)
        self._strangers = Shares(strangers, max(1.0, strangers * _AT_ONCE_S), clock)
        self._progress = Shares(limits.progress_messages_s, 2 * limits.progress_messages_s, clock)
        self._objections = Shares(_OBJECTIONS_S, _OBJECTIONS_AT_ONCE, clock)
        self._unproven = Shares(_OBJECTIONS_S, _OBJECTIONS_AT_ONCE, clock)
        self._copies = Shares(_OBJECTIONS_S, _OBJECTIONS_AT_ONCE, clock)
        self._online: OrderedDict[str, bool] = OrderedDict()

    def admits(self, device: str, leaf: str, size: int, *, known: bool, devices: int) -> bool:
        """Whether the server reads a message of ``size`` bytes. ``known``: the device said hello; ``devices`` have."""
        why = self._why_not(device, leaf, size, known=known, devices=devices)
        if why:
            self.counts[why] += 1
        return not why

    def _why_not(self, device: str, leaf: str, size: int, *, known: bool, devices: int) -> str:
        if size > (self._limits.hello_bytes if leaf == "hello" else _SIZES.get(leaf, size)):
            return f"{leaf} too large"
        if leaf == "progress" and not self._progress.allow(
            ""
        ):  # for people, who cannot read a thousand a second
            return "progress too often"
        if known:
            return ""
        if leaf == "hello":
            return "" if devices < self._limits.max_devices else "too many devices"
        if leaf == "status":
            return ""
        return "" if self._strangers.allow("") else "unknown names"

    def shares(self, device: str, *, known: bool) -> bool:
        """Whether a device that said hello may say one thing more. What pieces of an update may come is a matter of its
        size (:class:`edgefl_server.intake.updates.Intake`)."""
        allowed = not known or self._messages.allow(device)
        if not allowed:
            self.counts["messages too often"] += 1
        return allowed

    def answers(self, device: str, *, known: bool, proven: bool = True) -> bool:
        """Whether what is wrong with a message is told, to people and to the device. ``proven``: the device said it, if it
        signs at all; of what is not, anybody can send more under its name, so that has a share of its own."""
        shares = self._objections if proven else self._unproven
        allowed = (shares if known else self._strangers).allow(device if known else "")
        if not allowed:
            self.counts["objections too often"] += 1
        return allowed

    def turns_away(self, device: str) -> bool:
        """Counts a device of the list that finds no room; whether it is told so."""
        self.counts["no room"] += 1
        return self.answers(device, known=True)

    def answers_copy(self, device: str) -> bool:
        """Whether a copy of what the server has of a device's update is answered. Anybody can send these, so they take no
        other share; and whoever sends them has the device hear what it may wait for."""
        allowed = self._copies.allow(device)
        if not allowed:
            self.counts["copies too often"] += 1
        return allowed

    def presence(self, device: str, *, online: bool) -> None:
        """Remember the status of a name that said no hello; the one that was heard of longest ago is forgotten."""
        self._online.pop(device, None)
        self._online[device] = online
        if len(self._online) > self._limits.max_strangers:
            self._online.popitem(last=False)
            self.counts["unknown names"] += 1

    def greeted(self, device: str) -> bool:
        """The device says hello for the first time: whether it is online, as far as its status was heard."""
        return self._online.pop(device, True)
