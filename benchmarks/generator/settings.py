"""What a load is: how many devices, whose they are, and how well they behave."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.system.structs import filled
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.topics import checked_name

Manner = Literal["honest", "vanish", "late", "duplicate", "garbage"]
"""How a device deals with one task. vanish: it breaks its connection and comes back after a while. late: it sends its
update when the round's deadline is over. duplicate: it sends it twice. garbage: what it sends is well signed and no update.
"""


@dataclass(frozen=True)
class Shares:
    """The part of the tasks, from 0 to 1, that is dealt with in each bad manner; the rest is dealt with as it should be."""

    vanish: float = 0.0
    late: float = 0.0
    duplicate: float = 0.0
    garbage: float = 0.0

    def __post_init__(self) -> None:
        given = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        for name, share in given.items():
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} is a share of the tasks from 0 to 1, found {share:g}", option=name)
        if sum(given.values()) > 1.0:
            told = ", ".join(f"{name} {share:g}" for name, share in given.items() if share)
            raise ConfigError(f"{told} are more than all tasks together: their sum is at most 1")

    def manner(self, seed: str, device: str, round: int) -> Manner:
        """How ``device`` deals with a task of ``round``: the same in each run of one seed."""
        digest = hashlib.sha256(f"{seed}/{device}/{round}".encode()).digest()
        drawn = int.from_bytes(digest[:7]) / (1 << 56)
        names: tuple[Manner, ...] = ("vanish", "late", "duplicate", "garbage")
        for name in names:
            drawn -= getattr(self, name)
            if drawn < 0:
                return name
        return "honest"


@dataclass(frozen=True)
class Load:
    """Times in seconds. Devices are called ``<prefix>00000`` and so on, from ``first``.

    ``tier``: the one they ask for; "" leaves it to the server. ``fetch``: they fetch bundle and weights, as real devices do,
    and throw them away. ``train_s``: from a task to its update, in which ``progress_s`` messages a second tell how far it
    is. ``connecting``: so many connect at once. ``away_s``: until one that vanished is back. ``late_s``: after a task is
    taken, for those that are late; 0: once the deadline that the round has is over. ``format``: of the bundles.
    """

    federation: str
    devices: int
    prefix: str = "load-"
    first: int = 0
    seed: str = "0"
    tier: str = ""
    memory_bytes: int = 1 << 34
    samples: int = 100
    format: str = "onnx"
    fetch: bool = False
    train_s: float = 0.0
    progress_s: float = 0.0
    connecting: int = 64
    away_s: float = 30.0
    late_s: float = 0.0
    until_done: bool = True
    shares: Shares = Shares()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in (self.names[0], self.names[-1]):
            checked_name("device", name)

    @property
    def names(self) -> list[str]:
        """Of equal length, so that their updates have equal sizes."""
        last = self.first + self.devices - 1
        width = max(5, len(str(last)))
        return [f"{self.prefix}{number:0{width}}" for number in range(self.first, last + 1)]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes.

    ``connect_s``: until the broker had the hello of every device. ``tasks``: answered, or on their way. ``ack_*``: from
    an update's first chunk to the server's last word on it. ``resent_share``: of the updates, those that were sent again
    because no word came, or the server spoke of the round; ``asked_again``: acknowledgements that named missing chunks.
    ``fates``: how often the server said what to updates of which manner, like ``{"honest: accepted": 990}``;
    ``unanswered``: updates on which it has said nothing yet. ``cpu_s``: of this process.
    """

    devices: int
    connected: int
    connect_s: float
    drops: int
    rounds: int
    tasks: int
    updates: int
    update_bytes: int
    sent_messages: int
    sent_bytes: int
    received_messages: int
    received_bytes: int
    resent_share: float
    resent_chunks: int
    asked_again: int
    ack_p50_s: float
    ack_p99_s: float
    fates: dict[str, int]
    unanswered: int
    vanished: int
    seconds: float
    cpu_s: float


@dataclass
class Tally:
    """Counts of all devices together."""

    up: int = 0
    connect_s: float = 0.0
    drops: int = 0
    rounds: int = 0
    tasks: int = 0
    updates: int = 0
    update_bytes: int = 0
    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    again: int = 0
    resent_chunks: int = 0
    asked_again: int = 0
    unanswered: int = 0
    vanished: int = 0
    ack_s: array[float] = field(default_factory=lambda: array("d"))
    fates: Counter[str] = field(default_factory=Counter)

    def settled(self, manner: Manner, status: str, reason: str, seconds: float) -> None:
        """The server's last word on an update."""
        self.unanswered -= 1
        self.ack_s.append(seconds)
        self.fates[f"{manner}: {status}{reason and f' ({reason})'}"] += 1

    def summary(self, devices: int, seconds: float) -> Summary:
        times = sorted(self.ack_s)
        cpu = os.times()
        return filled(
            Summary,
            self,
            devices=devices,
            connected=self.up,
            connect_s=round(self.connect_s, 3),
            resent_share=round(self.again / max(1, self.updates), 5),
            ack_p50_s=round(quantile(times, 0.5), 4),
            ack_p99_s=round(quantile(times, 0.99), 4),
            fates=dict(self.fates),
            seconds=round(seconds, 3),
            cpu_s=round(cpu.user + cpu.system, 3),
        )


def quantile(ascending: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, max(0, -int(-share * len(ascending) // 1) - 1))]
