"""Clients train in this process, one portion after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgefl.simulator.trainers.local_rounds import LocalRounds
from edgefl.simulator.trainers.tasks import Portion, ReadCarry, Report, RoundTask
from server.taking.active import ActiveRound


@dataclass
class Here:
    """:class:`~edgefl.simulator.trainers.tasks.Trainers` without another process."""

    rounds: LocalRounds
    _active: ActiveRound | None = field(default=None, init=False)

    def begin(self, task: RoundTask, active: ActiveRound) -> None:
        self.rounds.begin(task)
        self._active = active

    def train(self, portions: Sequence[Portion], read: ReadCarry) -> Iterator[Report]:
        assert self._active is not None, "begin() comes first"
        for portion in portions:
            yield from self.rounds.train(self._active, portion, portion.carries(read))

    def close(self) -> None:
        """Nothing to do."""
