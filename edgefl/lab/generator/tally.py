"""What a load has done so far, in numbers."""

from __future__ import annotations

import os
from array import array
from collections import Counter

import msgspec

from edgefl.lab.generator.settings import Manner


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


class Tally:
    """Counts of all devices together."""

    def __init__(self) -> None:
        self.up = 0
        self.connect_s = 0.0
        self.drops = 0
        self.rounds = 0
        self.tasks = 0
        self.updates = 0
        self.update_bytes = 0
        self.sent_messages = 0
        self.sent_bytes = 0
        self.received_messages = 0
        self.received_bytes = 0
        self.again = 0
        self.resent_chunks = 0
        self.asked_again = 0
        self.unanswered = 0
        self.vanished = 0
        self.ack_s = array("d")
        self.fates: Counter[str] = Counter()

    def settled(self, manner: Manner, status: str, reason: str, seconds: float) -> None:
        """The server's last word on an update."""
        self.unanswered -= 1
        self.ack_s.append(seconds)
        self.fates[f"{manner}: {status}{reason and f' ({reason})'}"] += 1

    def summary(self, devices: int, seconds: float) -> Summary:
        times = sorted(self.ack_s)
        cpu = os.times()
        return Summary(
            devices=devices,
            connected=self.up,
            connect_s=round(self.connect_s, 3),
            drops=self.drops,
            rounds=self.rounds,
            tasks=self.tasks,
            updates=self.updates,
            update_bytes=self.update_bytes,
            sent_messages=self.sent_messages,
            sent_bytes=self.sent_bytes,
            received_messages=self.received_messages,
            received_bytes=self.received_bytes,
            resent_share=round(self.again / max(1, self.updates), 5),
            resent_chunks=self.resent_chunks,
            asked_again=self.asked_again,
            ack_p50_s=round(quantile(times, 0.5), 4),
            ack_p99_s=round(quantile(times, 0.99), 4),
            fates=dict(self.fates),
            unanswered=self.unanswered,
            vanished=self.vanished,
            seconds=round(seconds, 3),
            cpu_s=round(cpu.user + cpu.system, 3),
        )


def quantile(ascending: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, max(0, -int(-share * len(ascending) // 1) - 1))]
