"""Value of a finished simulation's model to each of its users, and the curvature of their losses there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from edgefl.analysis.heterogeneity.curvature import adapt_user, extremes
from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, batches
from edgefl.analysis.personal.evaluate import User
from edgefl.analysis.personal.finished import FinishedRun
from edgefl.analysis.personal.report import EvaluationSetting, PersonalReport, mean
from edgefl.api.simulate import Simulation
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_device.data.support import Protocol
from reproduce.entry import Measurements

AFTER, LITERAL, BEFORE = "after", "literal", "before"
GROUP_A, GROUP_B, MAJORITY = "half A", "half B", "majority"
KAPPA, CURVED, GRADIENTS = "kappa", "alpha lambda", "gradients"
STEPS = "accuracy by steps"
CURVE = (0, 1, 2, 5, 10)

EXAMINED = 10
"""Users whose kappa is measured, evenly spread over the groups."""
SPECTRA, SPECTRUM_ROWS = 2, 128
"""Users whose largest eigenvalue is looked for, and samples of each."""

_GRADIENTS: Mapping[str, int] = {"fo": 2, "hf": 4, "exact": 4}
"""Batch gradients of a local step by mode (per_fedavg.md 2.9); FedAvg takes one."""


def measured(simulation: Simulation) -> Measurements:
    """Return the mean accuracy over all users after one step by protocol, before it, and of each half of the users;
    the level of their own majority class; kappa, alpha times the largest eigenvalue, and a user's batch gradients."""
    finished = FinishedRun.open(simulation.folder)
    seed = finished.federation.federation.seed
    report = _report(finished, "train_support", seed, CURVE)
    figures = {
        AFTER: report.mean,
        BEFORE: report.before,
        LITERAL: _report(finished, "paper_literal", seed, (0, 1)).mean,
        GROUP_A: _half(report, first=True),
        GROUP_B: _half(report, first=False),
        MAJORITY: report.majority or 0.0,
        GRADIENTS: float(_gradients(finished)),
    }
    curve = [(float(point.steps), point.value(report.metric)) for point in report.curve]
    rows = [(float(row.round), row.accuracy) for row in simulation.history if row.accuracy is not None]
    return Measurements(figures | _curvature(finished), {STEPS: curve, "accuracy": rows})


def _report(finished: FinishedRun, protocol: Protocol, seed: int, steps: tuple[int, ...]) -> PersonalReport:
    return finished.report(EvaluationSetting(finished.alpha, steps, protocol=protocol, seed=seed))


def _half(report: PersonalReport, *, first: bool) -> float:
    """Mean over half A (five classes) or half B (one or two) of the users, after one step."""
    middle = len(report.users) // 2
    users = report.users[:middle] if first else report.users[middle:]
    return mean([user.value(report.steps) for user in users])


def _gradients(finished: FinishedRun) -> int:
    """Batch gradients of one user over all rounds, if it took part in each."""
    algorithm = finished.federation.algorithm
    given = algorithm.arguments
    steps = int(given["steps"]) * int(given.get("factor", 1))
    per_step = _GRADIENTS[given.get("mode", "hf")] if algorithm.name == "per_fedavg" else 1
    return finished.federation.federation.rounds * steps * per_step


def _curvature(finished: FinishedRun) -> dict[str, float]:
    """kappa: the mean over some users; alpha lambda: the largest of fewer users (per_fedavg.md 6.6 g)."""
    weights = {
        name: torch.from_numpy(array.copy())
        for name, array in finished.weights.items()
        if name in finished.spec.weights
    }
    losses = FlatLoss(Objective.of(OutputSide(finished.spec, 0)), weights)
    users = [finished.users[at] for at in _spread(len(finished.users), EXAMINED)]
    kappas = [_kappa(losses, user, finished.alpha) for user in users]
    highest = [_largest(losses, users[at]) for at in _spread(len(users), SPECTRA)]
    return {KAPPA: mean(kappas), CURVED: finished.alpha * max(highest)}


def _spread(users: int, wanted: int) -> list[int]:
    return sorted({int(at) for at in np.linspace(0, users - 1, min(users, wanted)).round()})


def _shard(user: User) -> Shard:
    rows = torch.from_numpy(user.shards.train)
    return Shard(user.x[rows], user.y[rows])


def _kappa(losses: FlatLoss, user: User, alpha: float) -> float:
    parts = batches(_shard(user), user.number)
    own = losses.mean(lambda part: losses.gradient(losses.start, part), parts)
    return adapt_user(losses, own, parts, alpha).kappa


def _largest(losses: FlatLoss, user: User) -> float:
    parts = batches(_shard(user).rows(slice(SPECTRUM_ROWS)), user.number)
    _, high = extremes(
        lambda vector: losses.mean(lambda part: losses.product(losses.start, vector, part), parts),
        losses.start,
    )
    return high
