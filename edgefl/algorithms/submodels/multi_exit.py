"""Local training of a model with early exits, with distillation that the server enables late (ScaleFL, fiarse.md 3)."""

from __future__ import annotations

from dataclasses import replace

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import Scalars, Schedule
from edgefl.errors import ModelError
from edgefl.models.losses.exit_loss import WEIGHT, ExitLoss
from edgefl.objective.objective import Objective

BEGIN = 0.25
"""Fraction of the rounds after which distillation begins."""


def multi_exit(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    kd_weight: float | None = None,
) -> Algorithm:
    """Return SGD on the losses of all exits (ScaleFL, Ilhan et al. 2023; fiarse.md 3).

    The weight of distillation is a scalar of the round. The other options come from
    :func:`edgefl.algorithms.baselines.sgd.sgd`.

    Over the exits j = 1..m of the tier the loss is ``sum_j j / (m (m + 1) / 2) * (CE_j + [j < m] kd_weight * KL(p_m ||
    p_j))`` (:class:`edgefl.models.losses.exit_loss.ExitLoss`). ``kd_weight`` (default: the model's own, else 0) is the
    default of ``hyper.kd_weight``, which the server announces after a quarter of the rounds, and 0 before. With a weight of
    0 the graphs have neither the scalar nor the divergence, and this is ``sgd``.

    Args:
        objective: Objective of a model with early exits.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        momentum: Momentum of local SGD; its buffers are 0 at the start of a round.
        weight_decay: Weight decay of conv and dense kernels.
        kd_weight: Weight of distillation. None: the model's own.

    Raises:
        ModelError: The model has no exits.
    """
    loss = objective.loss
    if not isinstance(loss, ExitLoss):
        raise ModelError(
            "the algorithm multi_exit trains models with early exits, and this one has none: give it some by "
            "edgefl.models.exits.with_exits, or train it by sgd",
            loss=type(loss).__name__,
        )
    weight = float(loss.kd_weight if kd_weight is None else kd_weight)
    algorithm = sgd(
        replace(objective, loss=replace(loss, kd_weight=weight, announced=bool(weight))),
        batch=batch,
        steps=steps,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
    )
    if not weight:
        return replace(algorithm, name="multi_exit")
    return replace(
        algorithm, name="multi_exit", hyper={**algorithm.hyper, WEIGHT: weight}, schedule=_schedule(weight)
    )


def _schedule(weight: float) -> Schedule:
    """Return the schedule of ``hyper.kd_weight``: 0 until the share ``BEGIN`` of the rounds has passed, then ``weight``."""

    def at(position: int, rounds: int) -> Scalars:
        return {WEIGHT: weight if position >= BEGIN * rounds - 1e-9 else 0.0}

    return at
