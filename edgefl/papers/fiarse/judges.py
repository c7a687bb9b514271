"""How FIARSE's claims are judged (fiarse.md 9.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgefl.papers.results import Judge, Judged, Results, told

MOST_SEEDS = 0.8
"""Of the seeds, where the specification says "4 of 5"."""


def mostly_above(better: str, worse: str, figures: Sequence[str]) -> Judge:
    """``better`` is ahead in the paired mean of each figure, and for 4 of 5 seeds."""

    def judge(results: Results) -> Judged:
        differences = [results.of(better, each) - results.of(worse, each) for each in figures]
        held = all(
            each.mean() > 0 and (each > 0).sum() >= math.ceil(MOST_SEEDS * len(each)) for each in differences
        )
        ours = ", ".join(f"{figure} {told(each)}" for figure, each in zip(figures, differences, strict=True))
        return Judged(held, ours)

    return judge


def largest_gap(arm: str, others: Sequence[str], small: str, large: str) -> Judge:
    """The mean distance from figure ``small`` to ``large`` is the largest for ``arm``."""

    def judge(results: Results) -> Judged:
        gaps = {
            each: 100 * (results.mean(each, large) - results.mean(each, small)) for each in (arm, *others)
        }
        ours = ", ".join(f"{name} {gap:.1f}" for name, gap in gaps.items())
        return Judged(all(gaps[arm] > gaps[each] for each in others), ours)

    return judge


def above_all(
    better: str, others: Sequence[str], figures: Sequence[str], *, every_seed: bool = True
) -> Judge:
    """``better`` is ahead of each of the others in each figure: for every seed, or in the mean."""

    def judge(results: Results) -> Judged:
        held, said = True, []
        for figure in figures:
            nearest = {}
            for other in others:
                differences = results.of(better, figure) - results.of(other, figure)
                held &= bool((differences.min() if every_seed else differences.mean()) > 0)
                nearest[other] = differences
            other = min(nearest, key=lambda name: float(nearest[name].mean()))
            said.append(f"{figure}: {told(nearest[other])} on {other}")
        return Judged(held, ", ".join(said))

    return judge


def reached(arm: str, figure: str, least: float) -> Judge:
    """The mean of ``figure`` is at least ``least``."""

    def judge(results: Results) -> Judged:
        values = results.of(arm, figure)
        return Judged(bool(values.mean() >= least), f"{values.mean():.3f} (least {values.min():.3f})")

    return judge


def steadier(arm: str, sizes: Sequence[str], lag: int) -> Judge:
    """Masks ``lag`` models apart differ less in the last tenth of the rounds than in the first, and the larger the size, the
    less."""

    def judge(results: Results) -> Judged:
        last = [results.mean(arm, f"moved {lag} {each}") for each in sizes]
        first = [results.mean(arm, f"first moved {lag} {each}") for each in sizes]
        falls = all(end < begin for begin, end in zip(first, last, strict=True))
        ordered = all(larger < smaller for smaller, larger in pairwise(last))
        ours = ", ".join(
            f"{size}: {begin:.3f} to {end:.3f}" for size, begin, end in zip(sizes, first, last, strict=True)
        )
        return Judged(falls and ordered, ours)

    return judge


def sooner(arm: str, other: str, lines: Sequence[str]) -> Judge:
    """``arm`` comes to where ``other`` ends, in no more rounds than ``other``: for each line, in the mean over the seeds. A
    run that does not come there counts as one round more than it has."""

    def judge(results: Results) -> Judged:
        held, said = True, []
        for name in lines:
            mine, theirs = [], []
            for own, its in zip(results.lines[arm], results.lines[other], strict=True):
                target = its[name][-1][1]
                mine.append(_first(own[name], target))
                theirs.append(_first(its[name], target))
            held &= float(np.mean(mine)) <= float(np.mean(theirs))
            said.append(f"{name}: round {np.mean(mine):.0f} against {np.mean(theirs):.0f}")
        return Judged(held, ", ".join(said))

    return judge


def gains_more(arm: str, other: str, after: str, figure: str) -> Judge:
    """``arm`` gains more than ``other`` from arms of their names and ``after``, in the paired mean."""

    def judge(results: Results) -> Judged:
        mine, theirs = (
            results.of(f"{name}{after}", figure) - results.of(name, figure) for name in (arm, other)
        )
        return Judged(bool((mine - theirs).mean() > 0), f"{told(mine)} against {told(theirs)}")

    return judge


def _first(line: Sequence[tuple[float, float]], target: float) -> float:
    return next((x for x, y in line if y >= target), line[-1][0] + 1)
