"""STEM (Khanduri et al. 2021): recursive momentum without a preconditioner; FAFED with A = 1 and no v."""

from __future__ import annotations

from typing import Literal

from edgefl.algorithms.adaptive.schedules import Constant, Decaying, DecayUnit, StepSizePlan
from edgefl.algorithms.adaptive.storm import Storm
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective

_SCHEDULED = frozenset({"lr", "alpha", "schedule", "w", "sigma", "c", "decay_unit", "epoch_steps"})


def stem(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.01,
    alpha: float = 0.1,
    schedule: Literal["constant", "decaying", "original"] = "constant",
    w: float = 1.0,
    sigma: float = 1.0,
    c: float | None = None,
    decay_unit: DecayUnit = "iteration",
    epoch_steps: int | None = None,
    opening_steps: int | None = None,
    clip: float | None = None,
    ext: float = 1.0,
) -> Algorithm:
    """Return STEM (Khanduri et al. 2021): recursive momentum, averaged with the models; FAFED without preconditioner.

    Every iteration uses ONE batch for the gradients gn at x_t and go at x_{t-1}::

        m <- gn + (1 - alpha_t) (m - go)
        x <- x - eta_t m

    Every ``steps`` iterations m and x are averaged, and that iteration steps with the averages.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Iterations per exchange (round trip between server and device).
        lr: Step size eta, or kbar of the paper in a decaying ``schedule``.
        alpha: Weight of the fresh gradient, in (0, 1].
        schedule: "constant". "decaying": eta_t = lr / (w + sigma^2 t)^(1/3) with constant alpha. "original": the same with
            alpha_{t+1} = c eta_t^2, at most 1.
        w: Offset of a decaying schedule.
        sigma: Factor of t in a decaying schedule.
        c: Factor of "original", which requires it.
        decay_unit: Unit of t: "iteration", or "epoch" of ``epoch_steps`` iterations.
        epoch_steps: Iterations of an epoch; required by ``decay_unit`` "epoch".
        opening_steps: Batches of the opening exchange. Default: ``steps``.
        clip: Norm over all tensors to which gn is scaled down; go gets the same factor. None: no limit.
        ext: Factor of go in m, in [0, 1]. 1 is the paper's method; 0 is plain heavy-ball momentum.

    Raises:
        ConfigError: A number is out of range, or ``c`` is missing.
    """
    if schedule == "original" and c is None:
        raise ConfigError(
            "stem: the schedule 'original' has alpha = c eta^2 and needs c; give it, or take 'decaying'"
        )
    made: StepSizePlan
    if schedule == "constant":
        made = Constant(lr, alpha)
    else:
        coupling = c if schedule == "original" else None
        made = Decaying(lr, alpha, w, sigma, decay_unit, epoch_steps, coupling)
    return Storm(
        "stem",
        objective,
        made,
        batch,
        steps,
        opening_steps=opening_steps,
        clip=clip,
        ext=ext,
        announced=_SCHEDULED,
    ).algorithm()
