"""What a load is: how many devices, whose they are, and how well they behave."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Literal

from edgefl.wire.errors import ConfigError
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
