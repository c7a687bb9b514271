"""Who trains the clients of a simulation, as its federation says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.digests import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.plan import Plan
from edgefl.simulator.trainers.actors import RayWorkers
from edgefl.simulator.trainers.local_rounds import LocalRounds
from edgefl.simulator.trainers.pool import Pool
from edgefl.simulator.trainers.processes import Processes
from edgefl.simulator.trainers.tasks import Portion, ReadCarry, Report, RoundTask, Trainers
from edgefl.simulator.trainers.worker import Told
from edgefl_server.round_aggregation import RoundAggregation

# Clients train in this process, one portion after the other.


@dataclass
class Here:
    """:class:`~edgefl.simulator.trainers.tasks.Trainers` without another process."""

    rounds: LocalRounds
    _active: RoundAggregation | None = field(default=None, init=False)

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        self.rounds.begin(task)
        self._active = active

    def train(self, portions: Sequence[Portion], read: ReadCarry) -> Iterator[Report]:
        assert self._active is not None, "begin() comes first"
        for portion in portions:
            yield from self.rounds.train(self._active, portion, portion.carries(read))

    def close(self) -> None:
        """Nothing to do."""


def trainers(plan: Plan, federation: Federation, dataset: Dataset, clients: ClientData) -> Trainers:
    """Of the simulation of ``federation``, to be closed. ConfigError for a Ray that cannot be had."""
    table = federation.simulation
    if table.workers == 1 and not table.ray:
        return Here(LocalRounds(plan.spec, plan.functions, clients, table.together))
    gpus = 1 if table.device == "cuda" else 0
    crew = RayWorkers(table.ray, table.workers, gpus) if table.ray else Processes()
    return Pool(crew, table.workers, Told(federation, dataset, clients, code_of(federation)))
