"""Local training of a model with early exits whose distillation the server can switch on late (ScaleFL, fiarse.md 3)."""

from __future__ import annotations

from dataclasses import replace

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.schedule import Scalars, Schedule
from edgefl.errors import ModelError
from edgefl.models.losses.exit_loss import WEIGHT, ExitLoss
from edgefl.objective.objective import Objective

BEGIN = 0.25
"""Distillation begins when this fraction of the rounds has passed."""


def multi_exit(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    kd_weight: float | None = None,
    eval_batch: int | None = None,
) -> Algorithm:
    """SGD on the losses of all exits (ScaleFL, Ilhan et al. 2023; fiarse.md 3).

    The weight of distillation is a scalar of the round. The options that are not told here are those of
    :func:`edgefl.algorithms.baselines.sgd.sgd`.

    Of the exits j = 1..m of the tier the loss is ``sum_j j / (m (m + 1) / 2) * (CE_j + [j < m] kd_weight * KL(p_m || p_j))``
    (:class:`edgefl.models.losses.exit_loss.ExitLoss`). ``kd_weight`` (default: the model's own, 0 unless it was given one)
    is the default of ``hyper.kd_weight``, which the server announces once a quarter of the rounds has passed, and 0 before.
    With a weight of 0 there is neither the scalar nor anything of the divergence in the graphs, and this is
    ``sgd``. ModelError for a model without exits.
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
        eval_batch=eval_batch,
    )
    if not weight:
        return replace(algorithm, name="multi_exit")
    return replace(
        algorithm, name="multi_exit", hyper={**algorithm.hyper, WEIGHT: weight}, schedule=_late(weight)
    )


def _late(weight: float) -> Schedule:
    """No distillation until the share BEGIN of the rounds has passed."""

    def at(position: int, rounds: int) -> Scalars:
        return {WEIGHT: weight if position >= BEGIN * rounds - 1e-9 else 0.0}

    return at
