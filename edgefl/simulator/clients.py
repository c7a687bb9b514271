"""Simulated clients: their data, speed and energy, and the updates that are lost.

The data are rows of one dataset, or files of each client. They are in memory only while the client trains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from edgefl.config.rounds import ClientsTable, SimulationTable
from edgefl.data.dataset import Dataset
from edgefl.wire.tensors import Array
from edgefl_device.data import sources
from edgefl_device.data.samples import LocalData, LocalSource


class ClientData(Protocol):
    """Training data of all clients."""

    @property
    def samples(self) -> Mapping[str, int]:
        """Number of samples of each client, by the client's name."""

    def of(self, client: str) -> LocalSource:
        """Load and return the training data of one client.

        Raises:
            DataError: If the data cannot be used.
        """


@dataclass(frozen=True, eq=False)
class SharedData:
    """Training samples of one ``dataset``, divided among the clients. ``rows``: by client, the indices of its samples
    (int64).
    """

    dataset: Dataset
    rows: Mapping[str, Array]

    @cached_property
    def samples(self) -> Mapping[str, int]:
        return {client: len(rows) for client, rows in self.rows.items()}

    def of(self, client: str) -> LocalSource:
        dataset, rows = self.dataset, self.rows[client]
        others = {name: each.train[rows] for name, each in dataset.others.items()}
        local = LocalData(dataset.train_x[rows], dataset.train_y[rows], f"client {client}", others)
        local.check()
        return local


@dataclass(frozen=True, eq=False)
class ClientFiles:
    """Training data in files of the clients. ``places``: by client, the path of its data, in a format that
    :func:`edgefl_device.data.sources.load` reads.
    """

    places: Mapping[str, Path]
    _samples: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> Mapping[str, int]:
        if not self._samples:
            self._samples.update({client: len(self.of(client)) for client in self.places})
        return self._samples

    def of(self, client: str) -> LocalSource:
        return sources.load(self.places[client])


_BITS = 8
_DRAWS = 1 << 64


@dataclass(frozen=True)
class ClientWork:
    """Work of one client in a round.

    Attributes:
        tier: Tier of the client.
        steps: Local training steps.
        down_bytes: Bytes that it downloads.
        up_bytes: Bytes that it uploads.
    """

    tier: str
    steps: int
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class _TrainingStage:
    """Stage of a client's round: fetching, training or sending. Its duration in seconds and its energy in joules."""

    seconds: float
    joules: float

    def spent(self, seconds: float) -> float:
        """Return the joules of the first ``seconds`` of the stage, spread evenly. A stage without duration spends all at
        once.
        """
        return self.joules if seconds >= self.seconds else self.joules * max(0.0, seconds) / self.seconds


@dataclass(frozen=True)
class SimulatedFleet:
    """Speed, energy and lost updates of the clients, as the table ``simulation`` (``table``) defines them.

    All draws depend on ``seed`` and names only. The speed of a client is drawn once for the run, the loss of its
    update for each round.
    """

    table: SimulationTable
    seed: int

    def slowness(self, tier: str, client: str) -> float:
        """Return the factor by which a client of ``tier`` needs more time than the median client. Its logarithm has a
        normal distribution.
        """
        drawn = self._uniform("slow", client)
        return math.exp(self._of_tier(tier).spread * NormalDist().inv_cdf(drawn))

    def absent(self, client: str) -> bool:
        """Return True if the table excludes the client from all rounds."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.absent)

    def vanishes(self, number: int, tier: str, client: str) -> bool:
        """Return True if the update of ``client``, of tier ``tier``, is lost in round ``number``."""
        return self._uniform("vanish", number, client) < self._of_tier(tier).dropout

    def seconds(self, client: str, work: ClientWork) -> float:
        """Return the seconds that ``client`` needs for ``work``, from the start of its download to the end of its
        upload.
        """
        return math.fsum(part.seconds for part in self._parts(client, work))

    def joules(self, number: int, client: str, work: ClientWork, seconds: float) -> float:
        """Return the joules that ``client`` has spent for ``work`` in round ``number``, ``seconds`` after it got its
        task.

        Download, training and upload follow each other; an unfinished client is charged for the time so far. A client
        whose update is lost is charged for download and training only.
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
        """Return a random number in (0, 1), drawn for ``client`` in round ``number``, by which clients that finish at
        the same time are sorted.
        """
        return self._uniform("arrive", number, client)

    def _parts(self, client: str, work: ClientWork) -> tuple[_TrainingStage, _TrainingStage, _TrainingStage]:
        table, slowness = self._of_tier(work.tier), self.slowness(work.tier, client)
        fetch, send = (
            _TrainingStage(
                slowness * _BITS * nbytes / (mbit * 1e6) if mbit else 0.0, joules_per_mb * nbytes / 1e6
            )
            for nbytes, mbit, joules_per_mb in (
                (work.down_bytes, table.down_mbit, table.down_joules_per_mb),
                (work.up_bytes, table.up_mbit, table.up_joules_per_mb),
            )
        )
        training = slowness * 1e-3 * table.step_ms * work.steps
        return fetch, _TrainingStage(training, table.watts * training), send

    def _of_tier(self, tier: str) -> ClientsTable:
        return self._tiers.get(tier, self._common)

    @cached_property
    def _common(self) -> ClientsTable:
        return self.table.of_tier("")

    @cached_property
    def _tiers(self) -> dict[str, ClientsTable]:
        return {name: self.table.of_tier(name) for name in self.table.tiers}

    def _uniform(self, *parts: object) -> float:
        """Return a uniform number in (0, 1) that depends only on the seed and ``parts``."""
        text = "/".join(map(str, (self.seed, *parts)))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return min((number + 0.5) / _DRAWS, 1.0 - 1e-16)
