"""The figures of an entry's runs, by arm and seed, and how claims are judged by them.

Runs of one seed share partition and initial weights: differences between arms are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Concatenate, ParamSpec

import numpy as np

from edgefl.errors import ConfigError
from edgefl.wire.tensors import Array

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Judged:
    """Verdict on a claim: ``held``, and the findings in words."""

    held: bool
    ours: str


@dataclass(frozen=True)
class Results:
    """``figures`` and ``lines``: of each arm a mapping for each seed, in the order of ``seeds``."""

    seeds: Sequence[int]
    figures: Mapping[str, Sequence[Mapping[str, float]]]
    lines: Mapping[str, Sequence[Mapping[str, Points]]]

    def of(self, arm: str, figure: str) -> Array:
        """float64 (seeds,); ConfigError for what no run told."""
        runs = self.figures.get(arm)
        if runs is None or any(figure not in run for run in runs):
            raise ConfigError(
                f"no figure {figure!r} of arm {arm!r}; arms: {', '.join(self.figures)}",
                arm=arm,
                figure=figure,
            )
        return np.array([run[figure] for run in runs], np.float64)

    def lead(self, arm: str, other: str, figure: str) -> Array:
        """Return the paired differences of ``arm`` from ``other``, float64 (seeds,)."""
        return self.of(arm, figure) - self.of(other, figure)

    def mean(self, arm: str, figure: str) -> float:
        """Over the seeds."""
        return float(self.of(arm, figure).mean())

    def deviation(self, arm: str, figure: str) -> float:
        """Return the deviation of one run over the seeds (divided by their number less one); 0 for one seed."""
        values = self.of(arm, figure)
        return float(values.std(ddof=1)) if len(values) > 1 else 0.0

    def line(self, arm: str, name: str) -> list[tuple[float, float]]:
        """Mean over the seeds at every x that all of them have."""
        runs = [dict(run[name]) for run in self.lines[arm] if name in run]
        if not runs:
            return []
        shared = set(runs[0]).intersection(*runs[1:])
        return [(x, float(np.mean([run[x] for run in runs]))) for x in sorted(shared)]


def first_reached(line: Points, target: float) -> float:
    """Return the first x of ``line`` whose value is at least ``target``, or one more than its last x if there is none."""
    return next((x for x, y in line if y >= target), line[-1][0] + 1)


Judge = Callable[[Results], Judged]
Arguments = ParamSpec("Arguments")


def judge_factory(rule: Callable[Concatenate[Results, Arguments], Judged]) -> Callable[Arguments, Judge]:
    """Turn ``rule``, a function of results and arguments, into a function that returns a judge for the arguments."""

    @wraps(rule)
    def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Judge:
        return lambda results: rule(results, *args, **kwargs)

    return make


@judge_factory
def above(
    results: Results,
    better: str,
    worse: str,
    figure: str,
    *,
    by: float = 0.0,
    every_seed: bool = False,
    unit: float = 100.0,
) -> Judged:
    """``better`` is more than ``by`` ahead of ``worse``, in the mean of the paired differences or for every seed.
    Differences are told times ``unit`` (points of a share)."""
    differences = results.lead(better, worse, figure)
    least = differences.min() if every_seed else differences.mean()
    return Judged(bool(least > by), told(differences, unit))


@judge_factory
def ahead_of_each(
    results: Results,
    arm: str,
    others: Sequence[str],
    figure: str,
    *,
    lower: bool = False,
    unit: float = 100.0,
    digits: int = 2,
) -> Judged:
    """``arm`` is above each of ``others`` (``lower``: below), in the mean of paired differences; the nearest is told."""
    differences = {each: results.lead(arm, each, figure) for each in others}
    ahead = {each: float(-found.mean() if lower else found.mean()) for each, found in differences.items()}
    nearest = min(ahead, key=lambda each: ahead[each])
    return Judged(ahead[nearest] > 0, f"{told(differences[nearest], unit, digits)} on {nearest}")


@judge_factory
def not_below(
    results: Results, one: str, other: str, figure: str, *, slack: float, unit: float = 100.0
) -> Judged:
    """The mean of ``one`` is at most ``slack`` below that of ``other``."""
    differences = results.lead(one, other, figure)
    return Judged(bool(differences.mean() >= -slack), told(differences, unit))


@judge_factory
def larger_lead(
    results: Results,
    one: tuple[str, str],
    other: tuple[str, str],
    figure: str,
    *,
    names: tuple[str, str] | None = None,
) -> Judged:
    """The lead in ``one``, the first arm over the second, is larger than in ``other``, in the paired mean. ``names`` of both
    leads introduce their numbers."""
    here, there = (results.lead(*arms, figure) for arms in (one, other))
    ours = f"{told(here)} against {told(there)}"
    if names is not None:
        ours = f"{names[0]} {told(here)}, {names[1]} {told(there)}"
    return Judged(bool((here - there).mean() > 0), ours)


@judge_factory
def ordered(
    results: Results,
    arms: Sequence[str],
    figure: str,
    *,
    slack: float = 0.0,
    unit: float = 100.0,
    digits: int = 2,
) -> Judged:
    """The means of ``arms`` rise in this order, none more than ``slack`` below the one before."""
    means = [results.mean(arm, figure) for arm in arms]
    rises = all(later >= earlier - slack for earlier, later in pairwise(means))
    return Judged(
        rises,
        ", ".join(f"{arm} {unit * value:.{digits}f}" for arm, value in zip(arms, means, strict=True)),
    )


def told(differences: Array, unit: float = 100.0, digits: int = 2) -> str:
    """Paired differences in words: their mean, and the least and the largest."""
    mean, least, most = (
        f"{unit * value:+.{digits}f}" for value in (differences.mean(), differences.min(), differences.max())
    )
    return mean if len(differences) == 1 else f"{mean} ({least} to {most})"
