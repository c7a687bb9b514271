"""Selection of the trainers from the federation's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.digests import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.trainers.local_rounds import (
    LocalRounds,
    Portion,
    ReadCarry,
    Report,
    RoundTask,
    Trainers,
)
from edgefl.simulator.trainers.pool import ForkingLauncher, Pool
from edgefl.simulator.trainers.worker import WorkerSetup
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.workers.ray_cluster import RayLauncher


@dataclass
class InProcessTrainer:
    """:class:`~edgefl.simulator.trainers.local_rounds.Trainers` without another process: one portion after the other."""

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
        """Do nothing."""


def trainers(plan: SimulationPlan, federation: Federation, dataset: Dataset, clients: ClientData) -> Trainers:
    """Return the trainers of a simulation, which the caller closes. Raises ConfigError if Ray is not available."""
    table = federation.simulation
    if table.workers == 1 and not table.ray:
        return InProcessTrainer(LocalRounds(plan.spec, plan.functions, clients, table.together))
    gpus = 1 if table.device == "cuda" else 0
    launcher = RayLauncher(table.ray, table.workers, "simulation", gpus) if table.ray else ForkingLauncher()
    return Pool(launcher, table.workers, WorkerSetup(federation, dataset, clients, code_of(federation)))
