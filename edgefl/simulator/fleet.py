"""How fast clients and their links are, what they spend, and who is lost on the way: a simulated round's time and energy."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import NormalDist

from edgefl.config.simulation import ClientsTable, SimulationTable

_BITS = 8
_DRAWS = 1 << 64


@dataclass(frozen=True)
class Work:
    """What a client of ``tier`` has to do in a round: fetch, make local steps, send."""

    tier: str
    steps: int
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class _Part:
    """A part of a round on one client, in seconds and in joules."""

    seconds: float
    joules: float

    def spent(self, seconds: float) -> float:
        """Joules of its first ``seconds``: as many in each second; all of them at once where it takes no time."""
        return self.joules if seconds >= self.seconds else self.joules * max(0.0, seconds) / self.seconds


@dataclass(frozen=True)
class Fleet:
    """The clients of ``table``, drawn by ``seed``: how slow each is for the whole run, and who vanishes in each round."""

    table: SimulationTable
    seed: int

    def slowness(self, tier: str, client: str) -> float:
        """How many times a median client's time it takes for everything; its logarithm is normal."""
        drawn = self._uniform("slow", client)
        return math.exp(self._of_tier(tier).spread * NormalDist().inv_cdf(drawn))

    def absent(self, client: str) -> bool:
        """Whether it is never there."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.absent)

    def vanishes(self, number: int, tier: str, client: str) -> bool:
        """Whether no update of it comes in round ``number``."""
        return self._uniform("vanish", number, client) < self._of_tier(tier).dropout

    def seconds(self, client: str, work: Work) -> float:
        """From a round's task to the update's arrival."""
        return math.fsum(part.seconds for part in self._parts(client, work))

    def joules(self, number: int, client: str, work: Work, seconds: float) -> float:
        """What a client has spent in round ``number`` when it ends, ``seconds`` after it began.

        Fetching, steps and sending follow one another, and one that is not ready stops where it is. One that vanishes
        has fetched and trained by then, and sends nothing.
        """
        fetch, train, send = self._parts(client, work)
        spent, left = 0.0, seconds
        for part in (fetch, train) if self.vanishes(number, work.tier, client) else (fetch, train, send):
            if left < 0.0:
                break
            spent += part.spent(left)
            left -= part.seconds
        return spent

    def place(self, number: int, client: str) -> float:
        """Who of those that take equally long is first, drawn for each round."""
        return self._uniform("arrive", number, client)

    def _parts(self, client: str, work: Work) -> tuple[_Part, _Part, _Part]:
        table, slowness = self._of_tier(work.tier), self.slowness(work.tier, client)
        fetch, send = (
            _Part(
                slowness * _BITS * nbytes / (mbit * 1e6) if mbit else 0.0,
                joules_per_mb * nbytes / 1e6,
            )
            for nbytes, mbit, joules_per_mb in (
                (work.down_bytes, table.down_mbit, table.down_joules_per_mb),
                (work.up_bytes, table.up_mbit, table.up_joules_per_mb),
            )
        )
        training = slowness * 1e-3 * table.step_ms * work.steps
        return fetch, _Part(training, table.watts * training), send

    def _of_tier(self, tier: str) -> ClientsTable:
        return self._tiers.get(tier, self._common)

    @cached_property
    def _common(self) -> ClientsTable:
        return self.table.of_tier("")

    @cached_property
    def _tiers(self) -> dict[str, ClientsTable]:
        return {name: self.table.of_tier(name) for name in self.table.tiers}

    def _uniform(self, *parts: object) -> float:
        """In (0, 1)."""
        text = "/".join(map(str, (self.seed, *parts)))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return min((number + 0.5) / _DRAWS, 1.0 - 1e-16)
