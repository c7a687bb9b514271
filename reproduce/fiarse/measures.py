"""Figures of a finished federation for FIARSE's tables and charts (fiarse.md 2.11, A12)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

import numpy as np

from edgefl.api.simulate import Simulation
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.standalone import FIRST_ROUND
from edgefl.wire import tensors
from edgefl.wire.tensors import Array
from reproduce.entry import Claim, Column, Confidence, Measurements, Points, curves, percent
from reproduce.fiarse.diagnostics import MaskExploration, global_metric, local_metric
from reproduce.results import Judged, Results, first_reached, judge_factory, told
from reproduce.submodel_accuracy import SubmodelAccuracy

LAGS = (1, 10)
"""h of A12; the second stands for 50 in fewer rounds."""
LAST = 3
"""Models over whose accuracies is averaged: clients of few classes make one round's accuracy an accident."""


def label(gamma: float) -> str:
    """Return the name of a size in figures: a power of two ``1/16``, others ``0.36``."""
    inverse = 1 / gamma
    return f"1/{inverse:.0f}" if gamma < 1 and inverse in (2, 4, 8, 16, 32, 64) else f"{gamma:g}"


def by_size(figure: str, sizes: Iterable[float]) -> tuple[Column, ...]:
    """Return a column in percent for each size of ``figure``, named ``figure size``."""
    return tuple(percent(f"{figure} {label(gamma)}", f"{figure} {label(gamma)}") for gamma in sizes)


def measured(unseen: Sequence[float] = (), *, rolling: bool = False) -> partial[Measurements]:
    """Figures and lines of a run: of the sizes that were trained, and of those in ``unseen``.

    ``rolling``: the windows stand as in the round before, when they were trained; beside that there are the figures
    ``first window g``, with the windows in their first place, where a deployed submodel has them.
    """
    return partial(_accuracies, unseen=tuple(unseen), rolling=rolling)


def _accuracies(simulation: Simulation, *, unseen: Sequence[float], rolling: bool) -> Measurements:
    """Figures ``global``, ``local`` (means over the trained sizes), ``global g``, ``local g``, ``unseen g``: means over the
    last :data:`LAST` models that were kept (A17). Lines ``global`` and ``global g`` by round, of all of them."""
    judge = SubmodelAccuracy.of(simulation)
    tiers = sizes(judge)
    cuts = {gamma: judge.cut(tier) for gamma, tier in tiers.items()}
    others = {gamma: judge.cut(tiers[min(tiers)], gamma) for gamma in unseen}
    last = list(simulation.kept)[-LAST:]
    told: dict[str, list[float]] = {}
    lines: dict[str, Points] = {}
    for number, path in simulation.kept.items():
        weights = tensors.load(path.read_bytes())
        place = number if rolling else FIRST_ROUND
        by_class = {gamma: judge.by_class(each, weights, place) for gamma, each in cuts.items()}
        everywhere = {gamma: judge.overall(each) for gamma, each in by_class.items()}
        row = _row("global", everywhere, global_metric(everywhere))
        for name, value in row.items():
            lines.setdefault(name, []).append((float(number), value))
        if number in last:
            locally = {gamma: judge.local(tiers[gamma], each) for gamma, each in by_class.items()}
            row |= _row("local", locally, local_metric(locally.items()))
            row |= {
                f"unseen {label(gamma)}": judge.overall(judge.by_class(each, weights, place))
                for gamma, each in others.items()
            }
            if rolling:
                row |= {
                    f"first window {label(gamma)}": judge.overall(judge.by_class(each, weights))
                    for gamma, each in cuts.items()
                }
            for name, value in row.items():
                told.setdefault(name, []).append(value)
    figures = {name: fmean(values) for name, values in told.items()}
    return Measurements(figures | {"up_mb": curves(simulation).figures["up_mb"]}, lines)


def _row(name: str, by_size: Mapping[float, float], mean: float) -> dict[str, float]:
    return {name: mean} | {f"{name} {label(gamma)}": value for gamma, value in by_size.items()}


def sizes(judge: SubmodelAccuracy) -> dict[float, str]:
    """The tiers by their size, ascending."""
    tiers = judge.federation.tiers
    return dict(sorted((table.gamma or 1.0, name) for name, table in tiers.items()))


def exploration(simulation: Simulation) -> Measurements:
    """Return how the submodels move (A12) in a run that kept the model of every round.

    Figures: ``ever trained`` (share of the maskable entries that any update has changed); ``explored g`` (share that the
    mask of size g has held in any round); ``moved h g`` (mean difference of masks h models apart, over the last tenth of
    the rounds); ``first moved h g`` (over the first tenth). The lines are the same by round.
    """
    judge = SubmodelAccuracy.of(simulation)
    cuts = {gamma: judge.cut(tier) for gamma, tier in sizes(judge).items()}
    watched = MaskExploration(LAGS)
    before: Mapping[str, Array] = {name: tensor.numpy() for name, tensor in judge.spec.weights.items()}
    changed: dict[str, Array] = {}
    lines: dict[str, Points] = {}
    for number, path in simulation.kept.items():
        weights = tensors.load(path.read_bytes())
        masks = {
            gamma: each.cut_of(before).masks for gamma, each in cuts.items() if isinstance(each, Importance)
        }
        moved = watched.add(masks, masks)
        for name in next(iter(masks.values())):
            now = weights[name] != before[name]
            changed[name] = changed[name] | now if name in changed else now
        before = weights
        ever = sum(int(each.sum()) for each in changed.values()) / sum(each.size for each in changed.values())
        told = {"ever trained": ever}
        for gamma in masks:
            told[f"explored {label(gamma)}"] = moved.exploration[gamma]
            for lag, difference in moved.difference[gamma].items():
                told[f"moved {lag} {label(gamma)}"] = difference
        for name, value in told.items():
            lines.setdefault(name, []).append((float(number), value))
    figures = {name: line[-1][1] for name, line in lines.items() if not name.startswith("moved")}
    for name, line in lines.items():
        if name.startswith("moved"):
            tenth = max(1, len(line) // 10)
            figures[name] = float(np.mean([value for _, value in line[-tenth:]]))
            figures[f"first {name}"] = float(np.mean([value for _, value in line[:tenth]]))
    return Measurements(figures, lines)


def accuracies_and_exploration(simulation: Simulation) -> Measurements:
    """Both, of a run that kept the model of every round; accuracies at its end alone."""
    judge = SubmodelAccuracy.of(simulation)
    by_size = {
        gamma: judge.overall(judge.by_class(judge.cut(tier), simulation.model))
        for gamma, tier in sizes(judge).items()
    }
    found = exploration(simulation)
    return Measurements(_row("global", by_size, global_metric(by_size)) | found.figures, found.lines)


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
