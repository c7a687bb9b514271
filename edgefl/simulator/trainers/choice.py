"""Who trains the clients of a simulation, as its federation says."""

from __future__ import annotations

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.digests import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.plan import Plan
from edgefl.simulator.trainers.actors import Actors
from edgefl.simulator.trainers.here import Here
from edgefl.simulator.trainers.local_rounds import LocalRounds
from edgefl.simulator.trainers.pool import Pool
from edgefl.simulator.trainers.processes import Processes
from edgefl.simulator.trainers.tasks import Trainers
from edgefl.simulator.trainers.worker import Told


def trainers(plan: Plan, federation: Federation, dataset: Dataset, clients: ClientData) -> Trainers:
    """Of the simulation of ``federation``, to be closed. ConfigError for a Ray that cannot be had."""
    table = federation.simulation
    if table.workers == 1 and not table.ray:
        return Here(LocalRounds(plan.spec, plan.functions, clients, table.together))
    gpus = 1 if table.device == "cuda" else 0
    crew = Actors(table.ray, table.workers, gpus) if table.ray else Processes()
    return Pool(crew, table.workers, Told(federation, dataset, clients, code_of(federation)))
