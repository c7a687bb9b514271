"""What goes to and fro between a simulation and those who train its clients: plain data, which pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.publish.model import Model
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import RoundModel

ReadCarry = Callable[[int], Arrays]
"""What a client kept, by the number that :class:`Portion` has."""


@dataclass(frozen=True)
class RoundTask:
    """A round under way. ``weights``: what clients read of the model, by tier and label of the port; ``received``: the
    model as they have it, where what is added of an update depends on that (:func:`edgefl_server.rounds.compares_updates`),
    else empty. ``since``: the model of an earlier round, which clients began with that are trained now; None:
    ``model``."""

    opened: OpenRound
    model: Model
    weights: Mapping[str, Arrays]
    hyper: Mapping[str, float]
    received: Arrays
    since: Model | None = None

    @property
    def began(self) -> Model:
        """What its clients begin with."""
        return self.since or self.model

    @property
    def start(self) -> RoundModel:
        """Model of the round."""
        received = self.received
        return RoundModel(self.model, lambda: received)

    @property
    def older(self) -> Mapping[int, RoundModel]:
        """Model of an earlier round that its clients begin with, by number of the round."""
        since, received = self.since, self.received
        return {} if since is None else {since.number + 1: RoundModel(since, lambda: received)}


@dataclass(frozen=True)
class Portion:
    """Clients of a tier that one trainer takes at a time: rounds are cut into portions before anybody knows who takes
    which, as some of a portion train together. ``kept``: of those that kept something to go on from, its number."""

    tier: str
    clients: tuple[str, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def carries(self, read: ReadCarry) -> dict[str, Arrays]:
        """What its clients go on from."""
        return {client: read(number) for client, number in self.kept.items()}


@dataclass(frozen=True)
class Report:
    """A client that trained. ``refused`` is the reason why its update was not added, empty where it was; the rest is told
    of updates that were."""

    client: str
    refused: str = ""
    loss: float = math.nan
    up_bytes: int = 0
    up_float32_bytes: int = 0
    carry: Arrays = field(default_factory=dict)


class Trainers(Protocol):
    """Train clients, check each update as it would travel, and add it to the round."""

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        """The round whose clients come next; what they send is added to ``active``."""

    def train(self, portions: Sequence[Portion], read: ReadCarry) -> Iterator[Report]:
        """Every client's report, once, in any order; after the last one all sums are in the round. Errors of data and
        bundles are those of the first portion that has one."""

    def close(self) -> None:
        """Nobody trains any more."""
