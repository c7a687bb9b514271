"""Verdicts on claims: paired t-tests over seeds, corrected by Holm within an entry; exact checks apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from edgefl.wire.tensors import Array
from reproduce.entry import Claim, Contrast, Entry, Lead, NotRunError, Results

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
        return f"{self.p:.3g}" if self.p == self.p else "-"


def verdicts(entry: Entry, results: Results, fewest_seeds: int) -> list[Verdict]:
    """Judge all claims of an entry. With fewer than ``fewest_seeds`` common seeds a claim is inconclusive."""
    judged: list[tuple[Claim, Sequence[Array], tuple[float, float] | None]] = []
    for claim in entry.claims:
        try:
            values = [contrast(results) for contrast in claim.parts]
        except NotRunError:
            values = [np.empty(0)]
        enough = min(map(len, values)) >= max(2, fewest_seeds)
        judged.append((claim, values, one_sided(claim, values) if enough else None))
    adjusted = iter(holm([min(1.0, 2 * min(pair)) for *_, pair in judged if pair], len(entry.claims)))
    found = []
    for claim, contrasts, pair in judged:
        p, run = next(adjusted) if pair else float("nan"), min(map(len, contrasts)) > 0
        answer: Answer = "inconclusive" if run else "not run"
        if pair and p < LEVEL:
            answer = "reproduced" if pair[0] < pair[1] else "contradicted"
        found.append(Verdict(claim, answer, interval_text(claim, contrasts) if run else "-", p))
    return found


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
    low, high = above(-claim.margin), 1 - above(claim.margin)  # small if the mean is above -m, and below +m
    return max(low, high), min(1.0, 2 * min(1 - low, 1 - high))


def holm(p: Sequence[float], claims: int = 0) -> list[float]:
    """Return Holm's adjusted p-values, in the order of ``p``, for so many ``claims``, of which the others have large p."""
    order, found = np.argsort(p), np.array(p, np.float64)
    factors = max(claims, len(p)) - np.arange(len(p))
    found[order] = np.minimum(1.0, np.maximum.accumulate(factors * found[order]))
    adjusted: list[float] = found.tolist()
    return adjusted


def interval_text(claim: Claim, contrasts: Sequence[Array]) -> str:
    """Return mean and 95 % interval of the mean of each contrast; of many only the one that decides, with its name."""

    def one(values: Array) -> str:
        mean = f"{claim.unit * values.mean():+.{claim.digits}f}"
        if len(values) < 2:
            return mean
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        return f"{mean} ± {claim.unit * half:.{claim.digits}f}"

    shown = "; ".join(map(one, contrasts))
    if len(shown) <= _CELL:
        return shown
    at = _deciding(claim, contrasts)
    name, shown = _own_name(claim.parts, at), one(contrasts[at])
    fits = name and len(f"{name}: {shown}") <= _CELL
    return f"{name}: {shown}" if fits else f"one of {len(contrasts)}: {shown}"


def _deciding(claim: Claim, contrasts: Sequence[Array]) -> int:
    """Return the index of the contrast of which the claim's p is: the one least sure to hold, or the surest to fail."""
    if min(map(len, contrasts)) < 2:
        return int(np.argmin([values.mean() for values in contrasts]))
    holds, fails = zip(*(_one(claim, values) for values in contrasts), strict=True)
    contradicted = len(fails) * min(fails) < max(holds)
    return int(np.argmin(fails) if contradicted else np.argmax(holds))


def _own_name(contrasts: Sequence[Contrast], at: int) -> str:
    """Return the words of a contrast's arms and figures that not all contrasts have."""
    words = [each.words for each in contrasts if isinstance(each, Lead)]
    if len(words) < len(contrasts):
        return ""
    shared = set.intersection(*map(set, words))
    return ", ".join(dict.fromkeys(word for word in words[at] if word not in shared))


def prediction(values: Array, runs: int = 1, cells: int = 1) -> tuple[float, float]:
    """Return the interval in which the mean of ``runs`` more runs is expected, from the figures of published runs.

    ``cells`` such intervals hold together at 95 % (Bonferroni). A figure with one published run is expected exactly.
    """
    mean, half = float(values.mean()), 1e-6 * float(np.abs(values).max())
    if len(values) > 1:
        spread = values.std(ddof=1) * np.sqrt(1 / runs + 1 / len(values))
        half += float(stats.t.ppf(1 - LEVEL / 2 / cells, len(values) - 1) * spread)
    return mean - half, mean + half
