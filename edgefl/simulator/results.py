"""Results of simulated rounds, and the state of a simulation between two rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgefl.simulator.clients import ClientWork
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.collapse import BestMetrics
from edgefl_server.coordinator.record import Participation, Turnout


class RoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """A finished round, ``closed`` or ``abandoned``: a line of ``rounds.jsonl`` and a row of ``rounds.csv``.

    Attributes:
        accuracy: Of the global model on the test set. None if the round was not evaluated, as for ``loss`` and ``metrics``.
        metric: Name of the headline metric.
        train_loss: Mean over the clients that reported.
        down_bytes: Weights that the clients fetched, each as a client that has none yet.
        up_bytes: Tensors of their updates; ``up_float32_bytes`` the same in float32.
        seconds: Real duration of the simulation of the round.
        simulated_s: Duration of the round in the federation's time.
        energy_j: Joules that all selected clients would have spent (table ``simulation``).
        staleness: Mean number of versions between an update's initial model and the round that counted it.
        fairness: Jain's index of the clients' numbers of reports so far, 1 if all are equal.
        weights_sha256: Digest of the model and the server's state as safetensors.
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


def scalars(row: RoundRow) -> Mapping[str, float]:
    """Return the numbers of a round by name, including its metrics. Missing values and the round's number are left out."""
    fields = {name: value for name, value in msgspec.structs.asdict(row).items() if name != "round"}
    numbers = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    return {**row.metrics, **numbers}


class SimulationState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a simulation between two rounds. With the model after round ``number`` and the carries, it resumes to the
    same bits.

    ``now`` is the federation's own time in seconds. ``took_part`` and ``turnouts`` are the coordinator's
    participation record (:class:`edgefl_server.coordinator.record.ParticipationRecord`).
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
    """Result of a simulated round: its row, the weights with the server's state after it, and the simulation's state."""

    row: RoundRow
    weights: Arrays
    standing: SimulationState


@dataclass
class RoundTally:
    """Figures of the current round: work of the clients, and the reports so far."""

    began: float
    losses: dict[str, float]
    work: dict[str, ClientWork] = field(default_factory=dict)
    down_bytes: int = 0
    up_bytes: int = 0
    up_float32_bytes: int = 0
    energy_j: float | None = None
    staleness: Sequence[int] = ()
