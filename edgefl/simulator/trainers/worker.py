"""Worker of a simulation: a process or actor that trains portions and returns their partial sum."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.runs import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.trainers.local_rounds import ClientPortion, LocalRounds, Report, RoundTask
from edgefl.wire.mqtt.events import EventSink
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import begin_aggregation
from edgefl_server.run_spec import RunSpec
from edgefl_server.workers.protocol import Stop


@dataclass(frozen=True)
class WorkerSetup:
    """Settings from which a worker builds its functions.

    Attributes:
        federation: Configuration.
        dataset: Dataset of the federation.
        clients: Training data of the clients.
        code: Digests of the code that the worker must have (:func:`edgefl.setup.runs.code_of`).
    """

    federation: Federation
    dataset: Dataset
    clients: ClientData
    code: Sequence[str]

    def build(self, sink: EventSink[WorkerMessage]) -> TrainingWorker:
        """Return a worker that sends its messages to ``sink``."""
        return TrainingWorker(self, sink)


@dataclass(frozen=True)
class TrainCommand:
    """Command to train ``portions``: pairs of a group of clients and the state that the algorithm keeps on each, by
    client.

    ``number`` identifies the command.
    """

    number: int
    portions: Sequence[tuple[ClientPortion, Mapping[str, Arrays]]]


@dataclass(frozen=True)
class CollectCommand:
    """Command to return the sum of all updates that the worker trained since the last such command."""


@dataclass(frozen=True)
class WorkerFailure:
    """Error of a command. ``number``: that of the failed :class:`TrainCommand`; None for another command."""

    error: Exception
    number: int | None


Command = RoundTask | TrainCommand | CollectCommand | Stop
"""A round task starts a round."""
WorkerMessage = list[Report] | PartialSum | None | WorkerFailure
"""Answers of :class:`TrainCommand` and :class:`CollectCommand`, in the order of the commands, and errors of any command."""


class TrainingWorker:
    """Worker that trains clients. Commands come from another process; messages go to an event sink."""

    stop_s = 0.0

    def __init__(self, setup: WorkerSetup, sink: EventSink[WorkerMessage]) -> None:
        self._setup = setup
        self._sink = sink
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._active: RoundAggregation | None = None
        self._sums: Accumulator | None = None

    def send(self, command: Command) -> None:
        """Queue a command."""
        self._commands.put(command)

    def run(self) -> None:
        """Build the functions, and handle commands until :class:`Stop`. An error is sent as :class:`WorkerFailure`."""
        command: Command | None = None
        while not isinstance(command, Stop):
            try:
                self._handle(command)
            except Exception as error:
                number = command.number if isinstance(command, TrainCommand) else None
                self._sink.put(WorkerFailure(_portable(error), number))
            command = self._commands.get()

    def _handle(self, command: Command | None) -> None:
        match command:
            case None:
                self._build()
            case RoundTask():
                self._rounds.begin(command)
                self._task = command
                self._active = None
            case TrainCommand(_, portions):
                task = self._task
                if self._active is None:
                    self._active = begin_aggregation(
                        self._spec, task.opened, task.start, device="cpu", sums=self._sums, older=task.older
                    )
                reports: list[Report] = []
                for portion, carries in portions:
                    reports += self._rounds.train(self._active, portion, carries)
                self._sink.put(reports)
            case CollectCommand():
                partial: PartialSum | None = None
                if self._active is not None:
                    partial = self._active.aggregator.partial()
                    self._sums, self._active = self._active.aggregator.release_sums(), None
                self._sink.put(partial)

    def _build(self) -> None:
        """Build the functions.

        Raises:
            ConfigError: If the code on this machine differs from that of the simulation.
        """
        torch.set_num_threads(1)
        setup = self._setup
        if code_of(setup.federation) != list(setup.code):
            raise ConfigError(
                "a worker of the simulation has other code: edgefl's version, or the file of the model or of the algorithm, "
                "is another one there; install the same on every node",
                expected=list(setup.code),
            )
        plan = SimulationPlan.of(setup.federation, setup.dataset, device="cpu")
        # The cores are taken by processes.
        self._spec: RunSpec = replace(plan.spec, aggregate=replace(plan.spec.aggregate, threads=1))
        self._rounds = LocalRounds(
            self._spec, plan.functions, setup.clients, setup.federation.simulation.together
        )


def _portable(error: Exception) -> Exception:
    """Return ``error`` if it can be pickled, else an error of a plain type with its text. Unexpected errors get a note
    with their traceback.
    """
    is_expected = isinstance(error, EdgeflError)
    if not is_expected:
        error.add_note(f"in a worker of the simulation:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error may hold anything
        text = str(error) if is_expected else "".join(traceback.format_exception(error))
        return type(error)(text) if type(error) in (ConfigError, EdgeflError) else RuntimeError(text)
    return error
