"""Reproducible result of a paper: the arms to compare, the published numbers, and the claims.

::

    ENTRY = Entry(
        name="fedbat/main",
        what="FedBAT, Table 1: one bit for each parameter against its baselines",
        arms=arms,                          # scale -> arms
        columns=(Column("accuracy", "test accuracy", SHARE),),
        published={"fedbat": {"accuracy": 0.8896}},
        claims=(Claim("H1", "FedBAT is ahead of SignSGD", "+8.5 points", above("fedbat", "signsgd", "accuracy")),),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.wire.text import suggest
from reproduce.results import Judge, Results

if TYPE_CHECKING:
    from edgefl.api.simulate import Simulation

Scale = Literal["smoke", "cpu", "paper"]
"""``smoke``: every run and every picture in seconds, numbers that mean nothing. ``cpu``: two cores, an evening.
``paper``: what the paper ran."""

SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")


def checked_scale(name: str) -> Scale:
    """Return the scale called ``name``. ConfigError if there is none."""
    for scale in SCALES:
        if scale == name:
            return scale
    raise ConfigError(f"no scale {name!r}; there are: {', '.join(SCALES)}{suggest(name, SCALES)}", scale=name)


Progress = Callable[[str], None]
Points = list[tuple[float, float]]
Settings = Mapping[str, object]
"""Of a federation, by dotted key."""

Confidence = Literal["", "low", "medium-low", "medium", "medium-high", "high"]
"""How sure the specification is that a claim shows at a small scale; "" where it does not say."""


class Measurements(msgspec.Struct, frozen=True):
    """Results of one run: numbers by name, lines (x, y) by name, and pictures (SVG text) by file name."""

    figures: dict[str, float]
    lines: dict[str, Points] = {}
    pictures: dict[str, str] = {}


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm: its seed and scale, a folder of its own, and whom to tell what is done."""

    seed: int
    scale: Scale
    folder: Path
    progress: Progress


def curves(simulation: Simulation) -> Measurements:
    """Figures ``accuracy`` (mean of the last tenth of the rounds), ``final``, ``best``, ``train_loss`` (of the last tenth)
    and ``up_mb`` (of all rounds); lines ``accuracy``, ``loss`` and ``train_loss`` by round."""
    rows = simulation.history
    lines: dict[str, Points] = {
        name: [(float(row.round), value) for row in rows if (value := getattr(row, name)) is not None]
        for name in ("accuracy", "loss", "train_loss")
    }
    accuracies = [value for _, value in lines["accuracy"]]
    figures = {"up_mb": sum(row.up_bytes for row in rows) / 1e6}
    if accuracies:
        figures |= {
            "accuracy": _of_last(accuracies),
            "final": accuracies[-1],
            "best": max(accuracies),
        }
    if lines["train_loss"]:
        figures["train_loss"] = _of_last([value for _, value in lines["train_loss"]])
    return Measurements(figures, {name: line for name, line in lines.items() if line})


def _of_last(values: Sequence[float]) -> float:
    last = values[-max(1, len(values) // 10) :]
    return sum(last) / len(last)


@dataclass(frozen=True)
class Federated:
    """An arm that is a federation: ``settings`` by dotted key, to which the run's seed is added, simulated as `edgefl
    simulate` does; ``measure`` reads what it left."""

    name: str
    settings: Settings
    measure: Callable[[Simulation], Measurements] = curves


@dataclass(frozen=True)
class Computed:
    """An arm that is no federation. ``settings``: what decides its numbers beside the seed."""

    name: str
    compute: Callable[[ArmRun], Measurements]
    settings: Settings = field(default_factory=dict)


Arm = Federated | Computed


@dataclass(frozen=True)
class Column:
    """A figure as the table shows it: times ``scale``, with ``digits`` behind the point."""

    figure: str
    title: str
    scale: float = 1.0
    digits: int = 3


def percent(figure: str, title: str) -> Column:
    """A share, shown in percent."""
    return Column(figure, title, 100.0, 2)


def shares(columns: Sequence[str], table: Mapping[str, Sequence[float]]) -> Mapping[str, Mapping[str, float]]:
    """Return the rows of a paper's ``table`` in percent as :attr:`Entry.published`, shares by arm and column."""
    return {
        arm: {figure: value / 100 for figure, value in zip(columns, values, strict=True)}
        for arm, values in table.items()
    }


@dataclass(frozen=True)
class Claim:
    """Statement of the paper (or of the specification, for a small scale) about the results.

    ``rank``: as the specification numbers it; ``paper``: what was found there; ``confidence``: the specification's, that it
    shows at a small scale. ``doubt``: the likely reason where it does not hold. ``exact``: it has to hold at every scale,
    and the command fails where it does not.
    """

    rank: str
    text: str
    paper: str
    judge: Judge
    confidence: Confidence = ""
    doubt: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture: the line ``line`` of each of ``arms`` (all, where there are none), mean over the seeds."""

    file: str
    title: str
    line: str
    x: str = "round"
    y: str = ""
    arms: tuple[str, ...] = ()
    log_y: bool = False


@dataclass(frozen=True)
class Entry:
    """A result of a paper. ``arms`` by scale; ``published`` numbers by arm and figure, in the unit of the figure; ``drawn``
    makes pictures (SVG text by file name) of the results, beside ``charts``. ``note``: how it was made, and how that differs
    from the paper."""

    name: str
    what: str
    arms: Callable[[Scale], Sequence[Arm]]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...]
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    charts: tuple[Chart, ...] = ()
    drawn: Callable[[Results], Mapping[str, str]] | None = None
    note: str = ""
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"smoke": 1, "cpu": 3, "paper": 5})
