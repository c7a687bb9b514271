"""How fast clients and their links are, and who is lost on the way: what makes a simulated round's time."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import NormalDist

from edgefl.config.simulation import SimulationTable

_BITS = 8
_DRAWS = 1 << 64


@dataclass(frozen=True)
class Fleet:
    """The clients of ``table``, drawn by ``seed``: how slow each is for the whole run, and who vanishes in each round."""

    table: SimulationTable
    seed: int

    def slowness(self, client: str) -> float:
        """How many times a median client's time it takes for everything; its logarithm is normal."""
        drawn = self._uniform("slow", client)
        return math.exp(self.table.spread * NormalDist().inv_cdf(drawn))

    def absent(self, client: str) -> bool:
        """Whether it is never there."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.absent)

    def vanishes(self, number: int, client: str) -> bool:
        """Whether no update of it comes in round ``number``."""
        return self._uniform("vanish", number, client) < self.table.dropout

    def seconds(self, client: str, steps: int, down_bytes: int, up_bytes: int) -> float:
        """From a round's task to the update's arrival."""
        table = self.table
        links = ((down_bytes, table.down_mbit), (up_bytes, table.up_mbit))
        transfers = sum(_BITS * nbytes / (mbit * 1e6) for nbytes, mbit in links if mbit)
        return self.slowness(client) * (1e-3 * table.step_ms * steps + transfers)

    def place(self, number: int, client: str) -> float:
        """Who of those that take equally long is first, drawn for each round."""
        return self._uniform("arrive", number, client)

    def _uniform(self, *parts: object) -> float:
        """In (0, 1)."""
        text = "/".join(map(str, (self.seed, *parts)))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return min((number + 0.5) / _DRAWS, 1.0 - 1e-16)
