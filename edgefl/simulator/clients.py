"""The clients' data: rows of one dataset, or what each of them has of its own. Nothing of a client is in memory but while
it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from edgefl.data.dataset import Dataset
from edgefl.wire.tensors import Array
from edgefl_device.data import sources
from edgefl_device.data.samples import Local, LocalData


class ClientData(Protocol):
    """What the clients hold, by name."""

    @property
    def samples(self) -> Mapping[str, int]:
        """Of every client."""

    def of(self, client: str) -> Local:
        """DataError says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Spread:
    """The training samples of ``dataset``, spread over the clients: ``rows`` (int64) of each."""

    dataset: Dataset
    rows: Mapping[str, Array]

    @cached_property
    def samples(self) -> Mapping[str, int]:
        return {client: len(rows) for client, rows in self.rows.items()}

    def of(self, client: str) -> Local:
        dataset, rows = self.dataset, self.rows[client]
        others = {name: each.train[rows] for name, each in dataset.others.items()}
        local = LocalData(dataset.train_x[rows], dataset.train_y[rows], f"client {client}", others)
        local.check()
        return local


@dataclass(frozen=True, eq=False)
class Own:
    """What each client has in ``places``, as a device reads it (:func:`edgefl_device.data.sources.load`)."""

    places: Mapping[str, Path]
    _samples: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> Mapping[str, int]:
        if not self._samples:
            self._samples.update({client: len(self.of(client)) for client in self.places})
        return self._samples

    def of(self, client: str) -> Local:
        return sources.load(self.places[client])
