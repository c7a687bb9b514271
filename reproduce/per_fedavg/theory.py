"""Per-FedAvg's lemmas and its theorem, put to the test where their constants are known (per_fedavg.md 6.3 to 6.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from edgefl.analysis.heterogeneity.theory import TrainingSetting, beta_max, drift
from reproduce.entry import Arm, ArmRun, Chart, Claim, Column, Computed, Entry, Measurements, Points, Scale
from reproduce.per_fedavg import bounds
from reproduce.per_fedavg.bounds import ALPHA, BATCH, DELTA, DRIFT_TAU, EXACT, FO, HF, MODES
from reproduce.per_fedavg.logistic import LANDSCAPE, SAMPLES, Users, starting_point
from reproduce.results import Judged, Results, judge_factory

ACCURACIES: Mapping[Scale, tuple[float, ...]] = {
    "smoke": (0.04, 0.02),
    "cpu": (0.04, 0.02, 0.01, 0.005),
    "paper": (0.04, 0.02, 0.01, 0.005, 0.0025),
}
RESTS: Mapping[Scale, int] = {"smoke": 200, "cpu": 10_000, "paper": 10_000}
"""Full steps (all users, all samples) after which the model is taken to be at rest."""

BIAS, BIAS_SHARE, DELTA_SLOPE = "bias, all samples", "bias / bound", "delta slope"
DRIFT_SHARE, DRIFT_SLOPE = "drift / bound", "drift slope"
LEFT, MEAN_SHARE, MEAN_SLOPE = "squared gradient at rest", "gradient / bound", "gradient slope"


def _bias_figures(mode: str, users: Users, generator: torch.Generator) -> Iterator[tuple[str, float]]:
    w = 2 * torch.randn(starting_point(1).shape, generator=generator, dtype=torch.float64)
    found = {inner: bounds.bias(mode, users, w, inner) for inner in (1, 2, SAMPLES)}
    limit = bounds.ESTIMATORS[mode].bias
    shares = [
        float(each.max()) / limit(LANDSCAPE, TrainingSetting(ALPHA, 1.0, 1, inner, SAMPLES, SAMPLES, DELTA))
        for inner, each in found.items()
    ]
    yield BIAS, float(found[SAMPLES].mean())
    yield BIAS_SHARE, max(shares)


def _drift_figures(mode: str, users: Users, generator: torch.Generator) -> tuple[dict[str, float], Points]:
    largest = beta_max(LANDSCAPE, _round(1.0))
    betas = [largest / 2**power for power in range(4)]
    lines = [bounds.drift(mode, users, beta, generator) for beta in betas]
    shares = [
        found / drift(LANDSCAPE, _round(beta), step, bounds.ESTIMATORS[mode])[1]
        for beta, line in zip(betas, lines, strict=True)
        for step, found in enumerate(line, 1)
    ]
    figures = {DRIFT_SHARE: max(shares), DRIFT_SLOPE: bounds.slope(betas, [line[-1] for line in lines])}
    return figures, [(float(step), found) for step, found in enumerate(lines[0], 1)]


def _round(beta: float) -> TrainingSetting:
    return TrainingSetting(ALPHA, beta, DRIFT_TAU, BATCH, BATCH, BATCH, DELTA)


def _run(work: ArmRun, mode: str) -> Measurements:
    generator = torch.Generator().manual_seed(work.seed)
    users = Users.drawn(generator)
    figures = dict(_bias_figures(mode, users, generator))
    lines: dict[str, Points] = {}
    if mode == HF:
        w = 2 * torch.randn(starting_point(1).shape, generator=generator, dtype=torch.float64)
        figures[DELTA_SLOPE], lines["error"] = bounds.delta_slope(users, w)
    own, lines["drift"] = _drift_figures(mode, users, generator)
    work.progress(f"{mode}: bias and drift")
    means = {}
    for eps in ACCURACIES[work.scale]:
        means[eps] = bounds.stationarity(mode, users, eps, generator)
        work.progress(f"{mode}: {bounds.rounds_of(eps)} rounds for eps = {eps:g}")
    lines["gradient"] = [(1 / eps, found) for eps, found in means.items()]
    # F(0) = log 2 before the inner step, at most that after it, and F is never below 0.
    shares = [found / bounds.theorem(mode, eps, math.log(2)) for eps, found in means.items()]
    return Measurements(
        figures
        | own
        | {
            LEFT: bounds.rest(mode, users, RESTS[work.scale]),
            MEAN_SHARE: max(shares),
            MEAN_SLOPE: bounds.slope(list(means)[-2:], list(means.values())[-2:]),
        },
        lines,
    )


def arms(scale: Scale) -> Sequence[Arm]:
    given = {"accuracies": list(ACCURACIES[scale]), "steps to rest": RESTS[scale]}
    return [Computed(mode, partial(_run, mode=mode), given) for mode in MODES]


@judge_factory
def _largest(results: Results, figure: str, most: float = 1.0) -> Judged:
    """The figure of every mode and seed is at most ``most``."""
    found = {mode: float(results.of(mode, figure).max()) for mode in MODES}
    return Judged(
        max(found.values()) <= most, ", ".join(f"{mode} {value:.2g}" for mode, value in found.items())
    )


@judge_factory
def _slopes(results: Results, figure: str, least: float, most: float, modes: Sequence[str] = MODES) -> Judged:
    """Judge whether the figure of every mode and seed lies within a range."""
    found = {mode: results.of(mode, figure) for mode in modes}
    held = all(least <= value <= most for values in found.values() for value in values)
    return Judged(held, ", ".join(f"{mode} {values.mean():.3f}" for mode, values in found.items()))


@judge_factory
def _vanishes(results: Results, figure: str) -> Judged:
    """FO's is at least a thousand times HF's, for every seed."""
    fo, hf, exact = (results.of(mode, figure) for mode in (FO, HF, EXACT))
    told = ", ".join(f"{mode} {each.max():.1e}" for mode, each in ((EXACT, exact), (HF, hf), (FO, fo)))
    return Judged(bool((fo > 1000 * np.maximum(hf, exact)).all()), told)


ENTRY = Entry(
    name="per_fedavg/theory",
    what="Per-FedAvg, Lemma 4.3 to Theorem 4.5: bias, drift and stationarity where every constant is known",
    arms=arms,
    columns=(
        Column(BIAS, BIAS, digits=4),
        Column(BIAS_SHARE, BIAS_SHARE),
        Column(DRIFT_SHARE, f"{DRIFT_SHARE}, millionths", 1e6, digits=4),
        Column(DRIFT_SLOPE, DRIFT_SLOPE),
        Column(MEAN_SHARE, f"{MEAN_SHARE}, millionths", 1e6, digits=4),
        Column(MEAN_SLOPE, MEAN_SLOPE),
        Column(LEFT, f"{LEFT}, millionths", 1e6),
    ),
    claims=(
        Claim("7", "biases are within Lemmas 4.3, H.1 and H.2", "upper bounds", _largest(BIAS_SHARE), exact=True),
        Claim(
            "7",
            "HF's error is O(delta^2) (exponent 1.9 to 2.1)",
            "2.8",
            _slopes(DELTA_SLOPE, 1.9, 2.1, (HF,)),
            exact=True,
        ),
        Claim("7", "all samples leave FO its bias, not HF", "alpha L B remains", _vanishes(BIAS), exact=True),
        Claim(
            "7",
            "FO comes to rest where F is not stationary; HF and EXACT where it is",
            "Corollary 4.6 against Lemma H.1",
            _vanishes(LEFT),
        ),
        Claim("7", "drift is within Corollary F.2", "35 beta^2 t tau (...)", _largest(DRIFT_SHARE), exact=True),
        Claim(
            "7",
            "drift grows with beta^2 (exponent 1.9 to 2.1)",
            "Corollary F.2",
            _slopes(DRIFT_SLOPE, 1.9, 2.1),
        ),
        Claim("7", "the mean of ||grad F||^2 is within Theorem 4.5", "upper bound", _largest(MEAN_SHARE), exact=True),
        Claim(
            "7",
            "and falls as eps with beta = O(eps), tau = O(eps^(-1/2)), K = O(eps^(-3/2)) (last step: exponent 0.9 or more)",
            "Corollary 4.6",
            _slopes(MEAN_SLOPE, 0.9, math.inf),
        ),
    ),
    charts=(
        Chart("gradient.svg", "Mean of ||grad F||^2 by 1 / eps", "gradient", x="1 / eps", log_y=True),
        Chart("drift.svg", "Drift in a round, the largest beta of the theorem", "drift", x="local step"),
        Chart("delta.svg", "HF: error of the difference quotient", "error", x="delta", log_y=True, arms=(HF,)),
    ),
    note=(
        "10 users of logistic regression (2 features, norm 1, two classes, 32 samples), on which B, L and rho are "
        "known for every w; edgefl's own algorithm per_fedavg in float64, alpha = 1, D = D' = D'' = 8, HF's delta = 0.001. "
        "Biases: at a random w, exactly, over all inner batches of 1 and of 2 samples, and of all samples ('bias, all "
        "samples' is the mean over the users). Drift: 16 local steps of all users, 64 repetitions, beta from the "
        "theorem's largest down to an eighth of it. Gradient: 5 of 10 users in a round, 8 repetitions, beta = 0.2 eps; at a "
        "step drawn in each round (Remark 4.7). At rest: after 10,000 steps of all users on all samples. The constants "
        "bound every w, hence shares of the bounds are small; for r < 1 with tau > 1 the specification does not certify "
        "them (per_fedavg.md 8.1)."
    ),
)  # fmt: skip
