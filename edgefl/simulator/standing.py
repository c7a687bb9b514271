"""Where a simulation stands between two rounds, and what became of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from edgefl.simulator.fleet import Work
from edgefl.simulator.row import Row
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.collapse import Best
from edgefl_server.coordinator.record import Participation, Turnout


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a simulation stands between two rounds: with the model after round ``number`` and what clients keep, enough to
    go on from to the same bits. ``now``: seconds of the federation's own time. ``took_part`` and ``turnouts`` are the
    coordinator's (:class:`edgefl_server.coordinator.record.Record`)."""

    number: int = 0
    position: int = 0
    base: int = 0
    members: tuple[str, ...] = ()
    refused: int = 0
    now: float = 0.0
    finished: bool = False
    best: Best = Best()
    took_part: dict[str, Participation] = {}
    turnouts: tuple[dict[str, Turnout], ...] = ()


@dataclass(frozen=True)
class Ended:
    """A round that is over: what to tell of it, the weights (with the server's state) after it, and where that leaves the
    simulation."""

    row: Row
    weights: Arrays
    standing: Standing


@dataclass
class Tally:
    """What clients have to do in the round under way, and what they reported."""

    began: float
    losses: dict[str, float]
    work: dict[str, Work] = field(default_factory=dict)
    down_bytes: int = 0
    up_bytes: int = 0
    up_float32_bytes: int = 0
    energy_j: float | None = None
    staleness: Sequence[int] = ()
