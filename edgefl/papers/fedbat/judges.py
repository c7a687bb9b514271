"""Judges of FedBAT's claims (fedbat.md 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.papers.results import Judged, Results, first_reached, judge_factory, told

FIGURE = "accuracy"


@judge_factory
def close(results: Results, one: str, other: str, within: float) -> Judged:
    """The mean of the paired differences is at most ``within`` either way."""
    differences = results.lead(one, other, FIGURE)
    return Judged(bool(abs(differences.mean()) <= within), told(differences))


@judge_factory
def loses_more(results: Results, arm: str, full: str, skewed: str, alike: str) -> Judged:
    """What ``arm`` lacks to ``full`` is more under partition ``skewed`` than under ``alike``; arms are named so."""
    lacks = [results.lead(f"{full}, {each}", f"{arm}, {each}", FIGURE) for each in (skewed, alike)]
    held = bool((lacks[0] - lacks[1]).mean() > 0)
    return Judged(held, f"{told(lacks[0])} against {told(lacks[1])}")


@judge_factory
def sooner(
    results: Results, arm: str, others: Sequence[str], reference: str, share: float, *, slack: float = 0.0
) -> Judged:
    """``arm`` comes to ``share`` of the accuracy that ``reference`` ends with (of the same seed) in no more rounds than each
    of ``others`` and ``slack`` of theirs, in the mean over the seeds. What does not come there counts as one round more
    than there are."""
    rounds = {
        each: float(
            np.mean(
                [
                    first_reached(run["accuracy"], share * float(end))
                    for run, end in zip(results.lines[each], results.of(reference, FIGURE), strict=True)
                ]
            )
        )
        for each in (arm, *others)
    }
    held = all(rounds[arm] <= rounds[each] * (1 + slack) for each in others)
    return Judged(held, ", ".join(f"{name} {value:.1f}" for name, value in rounds.items()))


@judge_factory
def ahead_at_equal_bytes(results: Results, arm: str, other: str) -> Judged:
    """``arm`` ends ahead of where ``other`` stood when it had sent as much, or (in its favour) after its first round, where
    that is more already."""
    gains, rounds = [], []
    for mine, theirs in zip(results.lines[arm], results.lines[other], strict=True):
        total = mine["sent"][-1][0]
        known = [value for sent, value in theirs["sent"] if sent <= total] or [theirs["sent"][0][1]]
        gains.append(mine["sent"][-1][1] - known[-1])
        rounds.append(len(known))
    text = f"{told(np.array(gains))}; {other} after round {max(rounds)}"
    return Judged(bool(np.mean(gains) > 0), text)
