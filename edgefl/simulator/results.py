"""Results of simulated rounds, and the state of a simulation between two rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from edgefl.simulator.clients import ClientWork
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.collapse import BestMetrics
from edgefl_server.coordinator.record import Participation, Turnout
from edgefl_server.events import DeviceEvaluation


class RoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """A finished round: a line of ``rounds.jsonl`` and a row of ``rounds.csv``.

    Attributes:
        round: Number of the round.
        outcome: ``closed`` (with a new model) or ``abandoned``.
        accuracy: Accuracy of the global model on the test set. Like ``loss`` and ``metrics`` it is missing if the
            round was not evaluated.
        loss: Loss on the test set.
        train_loss: Mean loss over the clients that reported; None if no client did.
        selected: Number of clients that got a task.
        reports: Number of accepted updates.
        rejected: Number of refused updates.
        declined: Number of clients that declined their task.
        down_bytes: Bytes that the clients fetched, each as a client without earlier weights.
        up_bytes: Bytes of the tensors in their updates; ``up_float32_bytes`` the same in float32.
        seconds: Real duration of the simulation of the round.
        simulated_s: Duration of the round in the federation's time.
        energy_j: Joules that all selected clients would have spent (table ``simulation``).
        staleness: Mean number of versions between an update's initial model and the round that counted it.
        weights_sha256: Digest of the model and the server's state as safetensors.
        text: Reason why the round was abandoned, or empty.
        metric: Name of the headline metric.
        metrics: Values of all metrics but the loss, by name.
        fairness: Jain's index of the clients' numbers of reports so far, 1 if all are equal.
        measures: True if clients measured the statistics of batch norm.
        evaluation: Results of a round in which clients evaluated the model on their held-out rows; None for a training
            round.
    """

    round: int
    outcome: str
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    selected: int
    reports: int
    rejected: int
    declined: int
    down_bytes: int
    up_bytes: int
    up_float32_bytes: int
    seconds: float
    simulated_s: float
    energy_j: float = 0.0
    staleness: float = 0.0
    weights_sha256: str
    text: str = ""
    metric: str = "accuracy"
    metrics: dict[str, float] = {}
    fairness: float | None = None
    measures: bool = False
    evaluation: DeviceEvaluation | None = None


class SimulationState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a simulation between two rounds. With the model after round ``number`` and the clients' carries, it
    resumes to the same bits.

    Attributes:
        number: Last finished round, closed or abandoned; 0 before the first.
        position: Completed exchanges (round trips between server and device) since the method began, or began again.
        base: Last closed round.
        members: Clients that must take part until the method begins again, if all are needed.
        refused: Failed attempts in a row at the present exchange.
        now: Time of the federation in seconds since its begin.
        finished: True if no round is left.
        best: Best values of the metrics so far.
        took_part: Participation by client (:class:`edgefl_server.coordinator.record.ParticipationRecord`).
        turnouts: For each of the last rounds, the turnout by tier (of the same record).
    """

    number: int = 0
    position: int = 0
    base: int = 0
    members: tuple[str, ...] = ()
    refused: int = 0
    now: float = 0.0
    finished: bool = False
    best: BestMetrics = BestMetrics()
    took_part: dict[str, Participation] = {}
    turnouts: tuple[dict[str, Turnout], ...] = ()


@dataclass(frozen=True)
class FinishedRound:
    """Result of a simulated round: its row, the model with the server's state after it, and the state of the simulation
    (``standing``).
    """

    row: RoundRow
    weights: Arrays
    standing: SimulationState


@dataclass
class RoundTally:
    """Figures of the current round.

    Attributes:
        began: Real time at which the round began, by :func:`time.perf_counter`.
        losses: Training loss by client, of the reports so far.
        work: Work of the selected clients, by name.
        down_bytes: Bytes that the clients with a report fetched.
        up_bytes: Bytes of the tensors in the updates so far; ``up_float32_bytes`` the same in float32.
        energy_j: Joules of an asynchronous round; None if they follow from ``work``.
        staleness: In an asynchronous round, the age of each update in versions.
    """

    began: float
    losses: dict[str, float]
    work: dict[str, ClientWork] = field(default_factory=dict)
    down_bytes: int = 0
    up_bytes: int = 0
    up_float32_bytes: int = 0
    energy_j: float | None = None
    staleness: Sequence[int] = ()
