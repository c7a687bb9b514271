"""A table or figure of a paper as data: the arms to run, the cells to show, and the claims to judge.

::

    ENTRY = Entry(
        name="fedbat/table2",
        title="Table 2: learned step sizes",
        arms=arms,                                                  # scale -> arms
        grids=(grid("rho", ["accuracy"], {"0": [87.9], "6": [89.0]}, lambda rho, _: (f"rho={rho}", "accuracy")),),
        claims=(Claim("learned step sizes are better", Lead("rho=6", "rho=0", "accuracy"), paper="+1.1"),),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from edgefl.errors import ConfigError
from edgefl.wire.tensors import Array

if TYPE_CHECKING:
    from edgefl.api.simulate import Simulation

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""``smoke``: everything runs for a few rounds, and numbers mean nothing. ``cpu``: a reduced experiment on two cores in which
every baseline learns. ``paper``: the paper's own size."""
SEEDS: Mapping[Scale, int] = {"smoke": 2, "cpu": 5, "paper": 3}
"""Seeds of an entry at each scale, and the fewest that decide a claim."""
ONCE: Mapping[Scale, int] = dict.fromkeys(SCALES, 1)
"""Seeds of an entry that nothing random decides, and of a pilot."""
JPEG = "CIFAR-10 as JPEG (q75)"
OURS_JPEG = "CIFAR-10: ours is JPEG (q75)"
"""Title of a table that shows the paper's CIFAR-10 beside runs on :data:`JPEG`."""

Points = Sequence[tuple[float, float]]
Settings = Mapping[str, Any]


DIVERGED = "diverged"
"""Only figure of a run whose training diverged."""


class NotRunError(ConfigError):
    """A claim or cell needs an arm or figure that no record has."""


class Measurements(msgspec.Struct, frozen=True):
    """Results of one run: numbers by name, and curves of points (x, y) by name."""

    figures: dict[str, float]
    lines: dict[str, list[tuple[float, float]]] = {}


@dataclass(frozen=True)
class ArmRun:
    """One run of a computed arm: its seed and scale, and a function that reports progress."""

    seed: int
    scale: Scale
    progress: Callable[[str], None]


def curves(simulation: Simulation) -> Measurements:
    """Return a simulation's accuracy and losses by round, and as figures their means over the last tenth of the rounds.

    Figures: ``accuracy``, ``best`` (shares), ``train_loss``, and ``up_mb`` (megabytes that all devices sent).
    """
    rows = simulation.history
    lines = {
        name: [(float(row.round), float(value)) for row in rows if (value := getattr(row, name)) is not None]
        for name in ("accuracy", "loss", "train_loss")
    }
    figures = {name: tail(lines[name]) for name in ("accuracy", "train_loss") if lines[name]}
    if lines["accuracy"]:
        figures["best"] = max(value for _, value in lines["accuracy"])
    return Measurements(
        figures | {"up_mb": sum(row.up_bytes for row in rows) / 1e6}, {k: v for k, v in lines.items() if v}
    )


def tail(line: Points, share: float = 0.1) -> float:
    """Return the mean of the last ``share`` of a curve's values, at least one."""
    return float(np.mean([y for _, y in line][-max(1, int(len(line) * share)) :]))


@dataclass(frozen=True)
class Federated:
    """Arm that is a simulated federation.

    Attributes:
        name: name of the arm within its entry.
        settings: the federation's settings by dotted key, without the seed.
        measure: function that reads figures and curves from the finished simulation.
    """

    name: str
    settings: Settings
    measure: Callable[[Simulation], Measurements] = curves


@dataclass(frozen=True)
class Computed:
    """Arm that is no federation. ``settings``: everything beside seed and scale that decides its numbers."""

    name: str
    compute: Callable[[ArmRun], Measurements]
    settings: Settings = field(default_factory=dict)


Arm = Federated | Computed
Arms = Callable[[Scale], Sequence[Arm]]
"""Function that returns the arms of a scale."""


@dataclass(frozen=True)
class Results:
    """Measurements of an entry's runs by arm and seed. Runs of one seed share partition and initial weights."""

    runs: Mapping[str, Mapping[int, Measurements]]

    def of(self, arm: str, figure: str, seeds: Sequence[int] | None = None) -> Array:
        """Return a figure of an arm, float64 (seeds,), in the order of ``seeds`` (all that the arm has, sorted).

        Raises:
            NotRunError: the arm has no run, or a run has no such figure.
        """
        runs = self.runs.get(arm, {})
        chosen = sorted(runs) if seeds is None else seeds
        if not chosen or any(figure not in runs[seed].figures for seed in chosen):
            raise NotRunError(
                f"expected {figure!r} of arm {arm!r}, found no run with it", arm=arm, figure=figure
            )
        return np.array([runs[seed].figures[figure] for seed in chosen], np.float64)

    def diverged(self, arm: str) -> bool:
        """Return whether training diverged for a seed of an arm."""
        return any(DIVERGED in run.figures for run in self.runs.get(arm, {}).values())

    def common_seeds(self, *arms: str) -> list[int]:
        """Return the sorted seeds that all ``arms`` were run for."""
        return sorted(set.intersection(*(set(self.runs.get(arm, {})) for arm in arms)))

    def line(self, arm: str, name: str) -> list[tuple[float, float]]:
        """Return the mean over the seeds of an arm's curve, at every x that all seeds have; [] without a run."""
        found = [dict(run.lines[name]) for run in self.runs.get(arm, {}).values() if name in run.lines]
        shared = set.intersection(*map(set, found)) if found else set()
        return [(x, float(np.mean([line[x] for line in found]))) for x in sorted(shared)]


Contrast = Callable[[Results], Array]
"""Function that returns a number for each seed: float64 (seeds,). A claim is about its mean over all seeds."""


@dataclass(frozen=True)
class Lead:
    """The contrast "``better`` minus ``worse``" of a figure, seed by seed. ``other_figure``: of ``worse``, if another."""

    better: str
    worse: str
    figure: str
    other_figure: str = ""

    def __call__(self, results: Results) -> Array:
        """Return the differences, float64 (seeds,)."""
        seeds = results.common_seeds(self.better, self.worse)
        high = results.of(self.better, self.figure, seeds)
        difference: Array = high - results.of(self.worse, self.other_figure or self.figure, seeds)
        return difference

    @property
    def words(self) -> list[str]:
        """Names of its arms and figures, split at commas: "FAFED", "low"."""
        names = (self.better, self.worse, self.figure, self.other_figure)
        return [word for name in names for word in name.split(", ") if word]


def larger_lead(one: tuple[str, str], other: tuple[str, str], figure: str) -> Contrast:
    """Return the contrast between the leads of two pairs (better, worse) of arms."""

    def differences(results: Results) -> Array:
        seeds = results.common_seeds(*one, *other)
        a, b, c, d = (results.of(arm, figure, seeds) for arm in (*one, *other))
        difference: Array = (a - b) - (c - d)
        return difference

    return differences


@dataclass(frozen=True)
class Claim:
    """Statement of a paper about its numbers, which runs can contradict.

    Attributes:
        text: the statement.
        contrasts: one contrast, or several that must all hold.
        paper: the paper's numbers for them, as text.
        least: superiority: each contrast's mean is above it.
        margin: equivalence, in place of superiority: each contrast's mean lies within plus and minus ``margin``.
        unit: factor for printing, 100 for shares in points.
        digits: digits behind the point.
    """

    text: str
    contrasts: Contrast | Sequence[Contrast]
    paper: str = ""
    least: float = 0.0
    margin: float | None = None
    unit: float = 100.0
    digits: int = 2

    @property
    def parts(self) -> Sequence[Contrast]:
        """All contrasts."""
        return (self.contrasts,) if callable(self.contrasts) else self.contrasts


@dataclass(frozen=True)
class Check:
    """Exact statement: a theorem, or numbers that are accounted. ``test`` returns whether it holds, and the findings."""

    text: str
    test: Callable[[Results], tuple[bool, str]]


def bounded(text: str, most: float, *cells: tuple[str, str], shown: str = "{:.2g}") -> Check:
    """Return the check that no seed's figures (arm, figure) are larger than ``most``; ``shown`` formats the largest size."""

    def test(results: Results) -> tuple[bool, str]:
        found = [float(np.abs(results.of(*cell)).max()) for cell in cells]
        return max(found) <= most, ", ".join(map(shown.format, found))

    return Check(text, test)


@dataclass(frozen=True)
class Cell:
    """Cell of a table: a figure of an arm, in print times ``unit``.

    ``paper``: the paper's number, as printed there. ``value``: function that returns the numbers of a cell that one figure
    cannot give, such as rounds to the target that another arm sets.
    """

    arm: str
    figure: str
    paper: float | None = None
    unit: float = 1.0
    digits: int = 2
    value: Contrast | None = None


@dataclass(frozen=True)
class Grid:
    """A table as in the paper: a row of cells by its heading; None leaves a cell empty."""

    corner: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell | None]]
    title: str = ""

    @property
    def cells(self) -> list[Cell]:
        """All cells that are not empty."""
        return [cell for row in self.rows.values() for cell in row if cell]


def grid(
    corner: str,
    columns: Sequence[str],
    paper: Mapping[str, Sequence[float | None]],
    source: Callable[[str, str], tuple[str, str] | tuple[str, str, Contrast] | None],
    *,
    unit: float = 100.0,
    digits: int | Sequence[int] = 2,
    title: str = "",
) -> Grid:
    """Return a table of which all cells are of one kind.

    Args:
        corner: heading of the first column.
        columns: headings of the others.
        paper: the paper's numbers by row, one for each column, as printed; None where it has none.
        source: function that returns (arm, figure) for a row and a column, with the cell's ``value`` where it has one, or
            None for an empty cell.
        unit: factor for printing our figures, 100 for shares in percent.
        digits: digits behind the point, of all columns or of each.
        title: heading of the table.
    """
    places = [digits] * len(columns) if isinstance(digits, int) else digits
    rows: dict[str, list[Cell | None]] = {}
    for row, numbers in paper.items():
        sources = (source(row, column) for column in columns)
        rows[row] = [
            None if found is None else Cell(found[0], found[1], number, unit, behind, *found[2:])
            for found, number, behind in zip(sources, numbers, places, strict=True)
        ]
    return Grid(corner, columns, rows, title)


def notes_of(doc: str | None) -> list[str]:
    """Return the paragraphs behind the first one of a module's docstring: notes and needs of its entries."""
    return [" ".join(each.split()) for each in (doc or "").split("\n\n")[1:]]


def note_of(doc: str | None) -> str:
    """Return the paragraphs behind the first one of a module's docstring as one note."""
    return " ".join(notes_of(doc))


@dataclass(frozen=True)
class Chart:
    """A figure of the paper: the curve ``line`` of each of ``arms`` (all without any), as a mean over the seeds.

    ``lines``: several curves of the first of ``arms`` instead.
    """

    file: str
    title: str
    line: str
    x: str = "round"
    y: str = ""
    arms: Sequence[str] = ()
    log_y: bool = False
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Choice:
    """Setting that a pilot chooses on validation data: the best of ``candidates``, arms by the value that they try."""

    name: str
    candidates: Mapping[str, str]
    figure: str = "accuracy"

    def of(self, results: Results) -> str:
        """Return the value whose arm has the highest mean; one that diverged is not chosen.

        Raises:
            NotRunError: a candidate was not run.
        """
        means = {
            value: float(results.of(arm, self.figure).mean())
            for value, arm in self.candidates.items()
            if not results.diverged(arm)
        }
        return max(means, key=lambda value: means[value])


@dataclass(frozen=True)
class Entry:
    """A table, a figure or a pilot.

    Attributes:
        name: paper/table, such as ``fafed/table2``.
        title: what the paper shows there.
        arms: function that returns the arms of a scale; an empty list where nothing is run.
        grids: the paper's tables.
        claims: statements about differences.
        checks: exact statements, judged for each seed.
        charts: the paper's figures.
        choices: settings that this pilot chooses.
        note: how the runs differ from the paper's, in a few sentences.
        needs: data and hours that an entry without runs would need, in sentences.
        other_data: the data are not the paper's, so that only differences are judged.
        seeds: number of seeds by scale.
        shares: name of the entry whose runs this one shows, such as a figure those of a table; ``arms`` are some of that's.
    """

    name: str
    title: str
    arms: Arms = lambda _: ()
    grids: Sequence[Grid] = ()
    claims: Sequence[Claim] = ()
    checks: Sequence[Check] = ()
    charts: Sequence[Chart] = ()
    choices: Sequence[Choice] = ()
    note: str = ""
    needs: str = ""
    other_data: str = ""
    seeds: Mapping[Scale, int] = field(default_factory=lambda: SEEDS)
    shares: str = ""

    @property
    def runs(self) -> str:
        """Name of the entry that has the runs."""
        return self.shares or self.name


def part(
    whole: Entry, name: str, title: str, shows: Callable[[str], bool] = lambda _: True, **fields: Any
) -> Entry:
    """Return an entry that shows runs of another one, ``whole``: those of the arms whose names ``shows`` accepts."""

    def arms(scale: Scale) -> Sequence[Arm]:
        return [arm for arm in whole.arms(scale) if shows(arm.name)]

    return Entry(name, title, arms, shares=whole.name, seeds=whole.seeds, **fields)
