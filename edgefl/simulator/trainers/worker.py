"""Worker of a simulation: a process or an actor that trains portions and returns their partial sum.

A caller sends (name of a method, arguments) and gets its result, or a :class:`WorkerFailure`.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.digests import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.trainers.local_rounds import LocalRounds, Portion, Report, RoundTask
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import begin_aggregation
from edgefl_server.run_spec import RunSpec

Method = Literal["build", "begin", "train", "collect"]
Dealt = Sequence[tuple[Portion, Mapping[str, Arrays]]]
"""Portions, and the carries of their clients."""


@dataclass(frozen=True)
class WorkerSetup:
    """Input for building a worker's functions.

    ``code``: digests of the simulation's code (:func:`edgefl.setup.digests.code_of`).
    """

    federation: Federation
    dataset: Dataset
    clients: ClientData
    code: Sequence[str]


@dataclass(frozen=True)
class WorkerFailure:
    """Error of a method."""

    error: Exception


class TrainingWorker:
    """Trainer of a simulation's clients, called from another process."""

    def answer(self, method: Method, *given: object) -> object:
        """Return the result of ``method``, or its :class:`WorkerFailure`."""
        try:
            return getattr(self, method)(*given)
        except Exception as error:
            return WorkerFailure(_portable(error))

    def build(self, told: WorkerSetup) -> None:
        """Build the functions. Raises ConfigError if the code here is not that of the simulation."""
        torch.set_num_threads(1)
        if code_of(told.federation) != list(told.code):
            raise ConfigError(
                "a worker of the simulation has other code: edgefl's version, or the file of the model or of the algorithm, "
                "is another one there; install the same on every node",
                expected=list(told.code),
            )
        plan = SimulationPlan.of(told.federation, told.dataset, device="cpu")
        # The cores are taken by processes.
        self._spec: RunSpec = replace(plan.spec, aggregate=replace(plan.spec.aggregate, threads=1))
        together = told.federation.simulation.together
        self._rounds = LocalRounds(self._spec, plan.functions, told.clients, together)
        self._sums: Accumulator | None = None

    def begin(self, task: RoundTask) -> None:
        """Start a round."""
        self._rounds.begin(task)
        self._task = task
        self._active: RoundAggregation | None = None

    def train(self, dealt: Dealt) -> list[Report]:
        """Return the reports of the clients in ``dealt``."""
        if self._active is None:
            task = self._task
            self._active = begin_aggregation(
                self._spec, task.opened, task.start, device="cpu", sums=self._sums, older=task.older
            )
        active = self._active
        return [
            report for portion, carries in dealt for report in self._rounds.train(active, portion, carries)
        ]

    def collect(self) -> PartialSum | None:
        """Return the partial sum of the portions since the last call, or None if there is none."""
        if self._active is None:
            return None
        partial = self._active.aggregator.partial()
        self._sums, self._active = self._active.aggregator.released(), None
        return partial


def _portable(error: Exception) -> Exception:
    """Return ``error`` in a form that can be pickled. Unexpected errors get a note with their traceback."""
    told = isinstance(error, EdgeflError)
    if not told:
        error.add_note(f"in a worker of the simulation:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error may hold anything
        text = str(error) if told else "".join(traceback.format_exception(error))
        return type(error)(text) if type(error) in (ConfigError, EdgeflError) else RuntimeError(text)
    return error
