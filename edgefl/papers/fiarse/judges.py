"""Judges of FIARSE's claims (fiarse.md 9.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgefl.papers.entry import Claim, Confidence
from edgefl.papers.results import Judged, Results, first_reached, judge_factory, told

MOST_SEEDS = 0.8
"""Of the seeds, where the specification says "4 of 5"."""


@judge_factory
def mostly_above(results: Results, better: str, worse: str, figures: Sequence[str]) -> Judged:
    """``better`` is ahead in the paired mean of each figure, and for 4 of 5 seeds."""
    differences = [results.lead(better, worse, each) for each in figures]
    held = all(
        each.mean() > 0 and (each > 0).sum() >= math.ceil(MOST_SEEDS * len(each)) for each in differences
    )
    ours = ", ".join(f"{figure} {told(each)}" for figure, each in zip(figures, differences, strict=True))
    return Judged(held, ours)


def ahead(
    other: str, paper: str, confidence: Confidence = "", *, rank: str = "H1", place: str = "", doubt: str = ""
) -> Claim:
    """Return the claim that FIARSE is ahead of ``other``, globally and locally."""
    text = f"{place}FIARSE is ahead of {other}, globally and locally"
    judge = mostly_above("FIARSE", other, ("global", "local"))
    return Claim(rank, text, paper, judge, confidence, doubt)


@judge_factory
def largest_gap(results: Results, arm: str, others: Sequence[str], small: str, large: str) -> Judged:
    """The mean distance from figure ``small`` to ``large`` is the largest for ``arm``."""
    gaps = {each: 100 * (results.mean(each, large) - results.mean(each, small)) for each in (arm, *others)}
    ours = ", ".join(f"{name} {gap:.1f}" for name, gap in gaps.items())
    return Judged(all(gaps[arm] > gaps[each] for each in others), ours)


@judge_factory
def above_all(
    results: Results, better: str, others: Sequence[str], figures: Sequence[str], *, every_seed: bool = True
) -> Judged:
    """``better`` is ahead of each of the others in each figure: for every seed, or in the mean."""
    held, said = True, []
    for figure in figures:
        nearest = {}
        for other in others:
            differences = results.lead(better, other, figure)
            held &= bool((differences.min() if every_seed else differences.mean()) > 0)
            nearest[other] = differences
        other = min(nearest, key=lambda name: float(nearest[name].mean()))
        said.append(f"{figure}: {told(nearest[other])} on {other}")
    return Judged(held, ", ".join(said))


@judge_factory
def reached(results: Results, arm: str, figure: str, least: float) -> Judged:
    """The mean of ``figure`` is at least ``least``."""
    values = results.of(arm, figure)
    return Judged(bool(values.mean() >= least), f"{values.mean():.3f} (least {values.min():.3f})")


@judge_factory
def steadier(results: Results, arm: str, sizes: Sequence[str], lag: int) -> Judged:
    """Masks ``lag`` models apart differ less in the last tenth of the rounds than in the first, and the larger the size, the
    less."""
    last = [results.mean(arm, f"moved {lag} {each}") for each in sizes]
    first = [results.mean(arm, f"first moved {lag} {each}") for each in sizes]
    falls = all(end < begin for begin, end in zip(first, last, strict=True))
    ordered = all(larger < smaller for smaller, larger in pairwise(last))
    ours = ", ".join(
        f"{size}: {begin:.3f} to {end:.3f}" for size, begin, end in zip(sizes, first, last, strict=True)
    )
    return Judged(falls and ordered, ours)


@judge_factory
def sooner(results: Results, arm: str, other: str, lines: Sequence[str]) -> Judged:
    """``arm`` comes to where ``other`` ends, in no more rounds than ``other``: for each line, in the mean over the seeds. A
    run that does not come there counts as one round more than it has."""
    held, said = True, []
    for name in lines:
        mine, theirs = [], []
        for own, its in zip(results.lines[arm], results.lines[other], strict=True):
            target = its[name][-1][1]
            mine.append(first_reached(own[name], target))
            theirs.append(first_reached(its[name], target))
        held &= float(np.mean(mine)) <= float(np.mean(theirs))
        said.append(f"{name}: round {np.mean(mine):.0f} against {np.mean(theirs):.0f}")
    return Judged(held, ", ".join(said))


@judge_factory
def gains_more(results: Results, arm: str, other: str, after: str, figure: str) -> Judged:
    """``arm`` gains more than ``other`` from arms of their names and ``after``, in the paired mean."""
    mine, theirs = (results.lead(f"{name}{after}", name, figure) for name in (arm, other))
    return Judged(bool((mine - theirs).mean() > 0), f"{told(mine)} against {told(theirs)}")
