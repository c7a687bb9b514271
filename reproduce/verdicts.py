"""Verdicts on claims: paired t-tests over seeds, corrected by Holm within an entry; exact checks apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from edgefl.wire.tensors import Array
from reproduce.entry import Claim, Entry, NotRunError, Results

Answer = Literal["reproduced", "contradicted", "inconclusive", "not run"]
ANSWERS: tuple[Answer, ...] = ("reproduced", "contradicted", "inconclusive", "not run")
LEVEL = 0.05
"""Two-sided error probability of all claims of an entry together."""
_CELL = 40
"""Most characters of a table's cell."""


@dataclass(frozen=True)
class Verdict:
    """Answer to a claim. ``ours``: mean and 95 % interval of each contrast; ``p``: Holm's adjusted value, NaN if not run."""

    claim: Claim
    answer: Answer
    ours: str
    p: float

    @property
    def p_text(self) -> str:
        """Printed p, "-" where nothing was tested."""
        return f"{self.p:.2g}" if self.p == self.p else "-"


def verdicts(entry: Entry, results: Results, fewest_seeds: int) -> list[Verdict]:
    """Judge all claims of an entry. With fewer than ``fewest_seeds`` common seeds a claim is inconclusive."""
    tested: list[tuple[Claim, list[Array], float, float]] = []
    answers: dict[int, Verdict] = {}
    for claim in entry.claims:
        try:
            values = [contrast(results) for contrast in claim.parts]
        except NotRunError:
            values = []
        if not values or min(map(len, values)) == 0:
            answers[id(claim)] = Verdict(claim, "not run", "-", float("nan"))
        elif min(map(len, values)) < max(2, fewest_seeds):
            answers[id(claim)] = Verdict(claim, "inconclusive", told(claim, values), float("nan"))
        else:
            tested.append((claim, values, *one_sided(claim, values)))
    adjusted = holm([min(1.0, 2 * min(holds, fails)) for *_, holds, fails in tested], len(entry.claims))
    for (claim, values, holds, fails), p in zip(tested, adjusted, strict=True):
        answer: Answer = "inconclusive"
        if p < LEVEL:
            answer = "reproduced" if holds < fails else "contradicted"
        answers[id(claim)] = Verdict(claim, answer, told(claim, values), p)
    return [answers[id(claim)] for claim in entry.claims]


def one_sided(claim: Claim, contrasts: Sequence[Array]) -> tuple[float, float]:
    """Return two one-sided p-values: small first where the claim holds, small second where it fails.

    All contrasts must hold (intersection-union test: the largest p); one that fails is enough (Bonferroni).
    """
    pairs = [_one(claim, values) for values in contrasts]
    return max(holds for holds, _ in pairs), min(1.0, len(pairs) * min(fails for _, fails in pairs))


def _one(claim: Claim, values: Array) -> tuple[float, float]:
    mean, freedom = values.mean(), len(values) - 1
    # Figures are counts of a few samples or rounds: differences that are equal on all seeds do not prove certainty. Half a
    # printed digit is the least error.
    error = max(values.std(ddof=1) / np.sqrt(len(values)), 0.5 * 10.0**-claim.digits / claim.unit)

    def above(bound: float) -> float:
        return float(stats.t.sf((mean - bound) / error, freedom))

    if claim.margin is None:
        return above(claim.least), 1 - above(claim.least)
    low, high = (
        above(-claim.margin),
        1 - above(claim.margin),
    )  # small where the mean is above -m, and below +m
    return max(low, high), min(1.0, 2 * min(1 - low, 1 - high))


def holm(p: Sequence[float], claims: int = 0) -> list[float]:
    """Return Holm's adjusted p-values, in the order of ``p``, for so many ``claims``, of which the others have large p."""
    claims = max(claims, len(p))
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda each: p[each])):
        largest = max(largest, min(1.0, (claims - rank) * p[at]))
        adjusted[at] = largest
    return adjusted


def told(claim: Claim, contrasts: Sequence[Array]) -> str:
    """Return mean and 95 % interval of the mean of each contrast, as text; of many only the farthest from the claim."""

    def number(value: float) -> str:
        return f"{claim.unit * value:+.{claim.digits}f}"

    def one(values: Array) -> str:
        if len(values) < 2:
            return number(values.mean())
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        return f"{number(values.mean())} ± {claim.unit * half:.{claim.digits}f}"

    shown = "; ".join(map(one, contrasts))
    if len(shown) <= _CELL:
        return shown
    if claim.margin is None:
        return f"least of {len(contrasts)}: {one(min(contrasts, key=lambda each: float(each.mean())))}"
    return f"farthest of {len(contrasts)}: {one(max(contrasts, key=lambda each: float(abs(each.mean()))))}"


def prediction(values: Array, runs: int = 1, cells: int = 1) -> tuple[float, float]:
    """Return the interval in which the mean of ``runs`` more runs is expected, from the figures of published runs.

    ``cells`` such intervals hold together at 95 % (Bonferroni). A figure with one published run is expected exactly.
    """
    mean, half = float(values.mean()), 1e-6 * float(np.abs(values).max())
    if len(values) > 1:
        spread = values.std(ddof=1) * np.sqrt(1 / runs + 1 / len(values))
        half += float(stats.t.ppf(1 - LEVEL / 2 / cells, len(values) - 1) * spread)
    return mean - half, mean + half
