"""Figures of a finished federation for FIARSE's tables and charts (fiarse.md 2.11, A12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from edgefl.api.simulate import Simulation
from edgefl.papers.entry import Column, Found, Points, curves, percent
from edgefl.papers.submodel_accuracy import SubmodelAccuracy
from edgefl.submodels.importance.diagnostics import Exploration, global_metric, local_metric
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.standalone import FIRST_ROUND
from edgefl.wire import tensors
from edgefl.wire.tensors import Array

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


def measured(unseen: Sequence[float] = (), *, rolling: bool = False) -> partial[Found]:
    """Figures and lines of a run: of the sizes that were trained, and of those in ``unseen``.

    ``rolling``: the windows stand as in the round before, when they were trained; beside that there are the figures
    ``first window g``, with the windows in their first place, where a deployed submodel has them.
    """
    return partial(_accuracies, unseen=tuple(unseen), rolling=rolling)


def _accuracies(simulation: Simulation, *, unseen: Sequence[float], rolling: bool) -> Found:
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
    return Found(figures | {"up_mb": curves(simulation).figures["up_mb"]}, lines)


def _row(name: str, by_size: Mapping[float, float], mean: float) -> dict[str, float]:
    return {name: mean} | {f"{name} {label(gamma)}": value for gamma, value in by_size.items()}


def sizes(judge: SubmodelAccuracy) -> dict[float, str]:
    """The tiers by their size, ascending."""
    tiers = judge.federation.tiers
    return dict(sorted((table.gamma or 1.0, name) for name, table in tiers.items()))


def exploration(simulation: Simulation) -> Found:
    """Return how the submodels move (A12) in a run that kept the model of every round.

    Figures ``ever trained`` (share of the maskable entries that any update has changed), ``explored g`` (share that the mask
    of size g has held in any round), ``moved h g`` (mean difference of masks h models apart, over the last tenth of the
    rounds) and ``first moved h g`` (over the first tenth); lines of the same by round.
    """
    judge = SubmodelAccuracy.of(simulation)
    cuts = {gamma: judge.cut(tier) for gamma, tier in sizes(judge).items()}
    watched = Exploration(LAGS)
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
    return Found(figures, lines)


def accuracies_and_exploration(simulation: Simulation) -> Found:
    """Both, of a run that kept the model of every round; accuracies at its end alone."""
    judge = SubmodelAccuracy.of(simulation)
    by_size = {
        gamma: judge.overall(judge.by_class(judge.cut(tier), simulation.model))
        for gamma, tier in sizes(judge).items()
    }
    found = exploration(simulation)
    return Found(_row("global", by_size, global_metric(by_size)) | found.figures, found.lines)
