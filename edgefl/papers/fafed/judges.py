"""Judges of FAFED's claims: by training loss, accuracy and what they cost (fafed.md 9)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.papers.fafed.measures import OBJECTIVE
from edgefl.papers.results import Judge, Judged, Points, Results, ahead_of_each, judge_factory, told
from edgefl.wire.tensors import Array

HEADERS = 0.03
"""Floats for each parameter that the names and shapes of an update's tensors take at most, in a model of these sizes."""


def lowest(arm: str, others: Sequence[str], figure: str) -> Judge:
    """``arm``'s loss is below each other one's."""
    return ahead_of_each(arm, others, figure, lower=True, unit=1.0, digits=4)


@judge_factory
def none_above(results: Results, arms: Sequence[str], other: str, figure: str) -> Judged:
    """No one of ``arms`` is above ``other`` in the paired mean."""
    above = {each: results.lead(each, other, figure) for each in arms}
    ours = ", ".join(f"{arm} {_loss(each)}" for arm, each in above.items())
    return Judged(all(each.mean() <= 0 for each in above.values()), ours)


@judge_factory
def smoother(results: Results, pairs: Mapping[str, Sequence[str]], figure: str) -> Judged:
    """Each arm's ``figure`` is the smallest, in the mean, beside those that stand after it."""
    held, said = True, []
    for arm, others in pairs.items():
        means = {each: results.mean(each, figure) for each in (arm, *others)}
        held &= all(means[arm] < means[each] for each in others)
        said.append(", ".join(f"{each} {mean:.3f}" for each, mean in means.items()))
    return Judged(held, "; ".join(said))


@judge_factory
def dearer(results: Results, pairs: Mapping[str, str], figures: Sequence[str]) -> Judged:
    """By how much an arm's training loss is below that of the other, which has cost less after as many rounds: less so
    where the arm may cost no more of each of ``figures`` (lines by round) than the other one's whole run did."""
    held, said = True, []
    for arm, other in pairs.items():
        leads = {"rounds": _lead(results, arm, other, None)}
        leads |= {figure: _lead(results, arm, other, figure) for figure in figures}
        held &= all(leads[figure].mean() < leads["rounds"].mean() for figure in figures)
        said.append(
            f"{arm} before {other} at equal "
            + ", ".join(f"{name} {_loss(lead)}" for name, lead in leads.items())
        )
    return Judged(held, "; ".join(said))


def _lead(results: Results, arm: str, other: str, figure: str | None) -> Array:
    """The other's last training loss less the arm's, of each seed: at its end, or where it had cost what the other did."""
    leads = []
    for own, its in zip(results.lines[arm], results.lines[other], strict=True):
        loss = list(own[OBJECTIVE])
        at = len(loss) if figure is None else _affordable(loss, own[figure], its[figure][-1][1])
        leads.append(its[OBJECTIVE][-1][1] - loss[max(at, 1) - 1][1])
    return np.array(leads, np.float64)


def _affordable(loss: Points, cost: Points, most: float) -> int:
    """Return the number of points of ``loss`` in rounds after which ``cost`` is at most ``most``."""
    rounds = bisect_right([spent for _, spent in cost], most)
    return bisect_right([number for number, _ in loss], float(rounds))


@judge_factory
def sends(results: Results, floats: Mapping[str, float]) -> Judged:
    """Each arm sends as many floats for each parameter in a round; names and shapes take at most :data:`HEADERS` more."""
    found = {arm: results.mean(arm, "floats_up") for arm in floats}
    wrong = {arm: value for arm, value in found.items() if not 0 <= value - floats[arm] <= HEADERS}
    ours = ", ".join(f"{arm} {value:.3f}" for arm, value in (wrong or found).items())
    return Judged(not wrong, ours)


def against(results: Results, arms: Sequence[str], x: str, line: str = OBJECTIVE) -> dict[str, Points]:
    """``line`` of each arm over the line ``x`` in place of rounds, both means over the seeds."""
    drawn: dict[str, Points] = {}
    for arm in arms:
        places = dict(results.line(arm, x))
        drawn[arm] = [(places[number], y) for number, y in results.line(arm, line) if number in places]
    return drawn


def _loss(differences: Array) -> str:
    return told(differences, 1.0, 4)
