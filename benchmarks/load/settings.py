"""Settings of a load, the devices' faults, and the counts of a run."""

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

Behaviour = Literal["honest", "vanish", "late", "duplicate", "garbage"]
"""Behaviour of a device with one task. vanish: it breaks its connection and connects again after a while. late: it sends its
update after the round's deadline. duplicate: it sends it twice. garbage: it sends an invalid update with a valid signature.
"""


@dataclass(frozen=True)
class BehaviourShares:
    """Shares of the tasks, from 0 to 1, with each fault; the rest is honest."""

    vanish: float = 0.0
    late: float = 0.0
    duplicate: float = 0.0
    garbage: float = 0.0

    def __post_init__(self) -> None:
        given = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        for name, share in given.items():
            if not 0.0 <= share <= 1.0:
                raise ConfigError(
                    f"{name} expects a share of the tasks from 0 to 1, found {share:g}", option=name
                )
        if sum(given.values()) > 1.0:
            text = ", ".join(f"{name} {share:g}" for name, share in given.items() if share)
            raise ConfigError(f"the sum of all shares is at most 1, found {text}; lower some of them")

    def behaviour(self, seed: str, device: str, round: int) -> Behaviour:
        """Return the behaviour of ``device`` in ``round``, which depends on ``seed`` alone."""
        digest = hashlib.sha256(f"{seed}/{device}/{round}".encode()).digest()
        drawn = int.from_bytes(digest[:7]) / (1 << 56)
        names: tuple[Behaviour, ...] = ("vanish", "late", "duplicate", "garbage")
        for name in names:
            drawn -= getattr(self, name)
            if drawn < 0:
                return name
        return "honest"


@dataclass(frozen=True)
class LoadSettings:
    """Number and behaviour of generated devices. Times are seconds.

    Attributes:
        prefix, first: devices are named ``<prefix>00000`` and so on, from ``first``.
        tier: requested tier; "" leaves it to the server.
        format: format of the bundles.
        fetch: fetch bundle and weights like real devices, and drop them.
        train_s: time from a task to its update, with ``progress_s`` messages a second.
        connecting: devices that connect at once.
        away_s: time until a vanished device connects again.
        late_s: time from a task to a late update; 0: after the round's deadline.
        until_done: stop the load when the training is done.
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
    shares: BehaviourShares = BehaviourShares()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in (self.names[0], self.names[-1]):
            checked_name("device", name)

    @property
    def names(self) -> list[str]:
        """Names of the devices, of equal length, so that their updates have equal sizes."""
        last = self.first + self.devices - 1
        width = max(5, len(str(last)))
        return [f"{self.prefix}{number:0{width}}" for number in range(self.first, last + 1)]


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a load. Times in seconds, sizes in bytes.

    Attributes:
        connect_s: time until the broker had the hello of every device.
        tasks: started tasks.
        ack_p50_s, ack_p99_s: time from an update's first chunk to the server's final answer.
        resent_share: share of updates that were sent again after a timeout or a message of the server.
        asked_again: acknowledgements that listed missing chunks.
        fates: number of answers by behaviour, like ``{"honest: accepted": 990}``.
        unanswered: updates without an answer so far.
        cpu_s: processor time of this process.
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
class LoadCounts:
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

    def settled(self, behaviour: Behaviour, status: str, reason: str, seconds: float) -> None:
        """Count the server's final answer to an update."""
        self.unanswered -= 1
        self.ack_s.append(seconds)
        self.fates[f"{behaviour}: {status}{reason and f' ({reason})'}"] += 1

    def summary(self, devices: int, seconds: float) -> LoadSummary:
        times = sorted(self.ack_s)
        cpu = os.times()
        return filled(
            LoadSummary,
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
    """Return the smallest value that at least this share of the values does not exceed; 0 without values."""
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, max(0, -int(-share * len(ascending) // 1) - 1))]
