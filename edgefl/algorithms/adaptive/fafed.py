"""FAFED (Wu, Huang, Hu, Huang 2023, Algorithm 2): one preconditioner for all devices, and recursive momentum."""

from __future__ import annotations

from typing import Literal

from edgefl.algorithms.adaptive.schedules import (
    Constant,
    Decaying,
    DecayUnit,
    StepSizePlan,
    TheorySteps,
    check_positive,
)
from edgefl.algorithms.adaptive.storm import FirstStep, SecondMoment, Storm, check_second_moment
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective

_SCHEDULED = frozenset(
    {"lr", "alpha", "schedule", "w", "decay_unit", "epoch_steps", "smoothness", "devices", "h"}
)


def fafed(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.01,
    alpha: float = 0.1,
    beta: float = 0.9,
    rho: float = 0.01,
    schedule: Literal["constant", "decaying", "theory"] = "constant",
    w: float | None = None,
    decay_unit: DecayUnit = "iteration",
    epoch_steps: int | None = None,
    smoothness: float | None = None,
    devices: int | None = None,
    h: float | None = None,
    first_step: FirstStep = "preconditioned",
    second_moment: SecondMoment = "elementwise",
    opening_steps: int | None = None,
    clip: float | None = None,
    ext: float = 1.0,
) -> Algorithm:
    """Return FAFED (Wu et al. 2023, Algorithm 2): recursive momentum, one preconditioner rebuilt from averages each round.

    Every iteration t = 1, 2, ... uses ONE batch for the gradients gn at x_t and go at x_{t-1}::

        m <- gn + (1 - alpha_t) (m - go);
        v <- beta v + (1 - beta) gn^2;
        x <- x - eta_t m / A.

    Every ``steps`` iterations v, m and x are averaged, A = sqrt(v) + rho is rebuilt from the average for all, and that
    iteration steps with the averages. m and v start as the mean of the devices' gradients at x_0 and of their squares, in an
    opening exchange.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Iterations q per exchange (round trip between server and device).
        lr: Step size eta, or lr of ``schedule``.
        alpha: Weight of the fresh gradient, in (0, 1].
        beta: Weight of the past of v, in [0, 1).
        rho: Constant added to sqrt(v), above 0.
        schedule: "constant": eta = ``lr`` and ``alpha``. "decaying": eta_t = lr / (w + t)^(1/3), w = 1, where lr is the
            paper's rho h. "theory": Theorem 2 from ``smoothness`` and ``devices``, without lr and alpha.
        w: Offset of the schedule. Default: 1, or 3/2 for "theory".
        decay_unit: Unit of t in "decaying": "iteration", or "epoch" of ``epoch_steps`` iterations.
        epoch_steps: Iterations of an epoch; required by ``decay_unit`` "epoch".
        smoothness: L of Theorem 2, the smoothness of the loss; required by "theory".
        devices: N of Theorem 2, the number of devices; required by "theory".
        h: h of Theorem 2. Default: N^(2/3) / L.
        first_step: "plain" leaves A out of the step from x_0, as the paper prints it (fafed.md 8.2).
        second_moment: "elementwise" as above, or one number for the whole model
            (:data:`~edgefl.algorithms.adaptive.storm.SecondMoment`).
        opening_steps: Batches of the opening exchange. Default: ``steps``.
        clip: Norm over all tensors to which gn is scaled down; go gets the same factor. None: no limit.
        ext: Factor of go in m, in [0, 1]. 1 is the paper's method; 0 is plain heavy-ball momentum.

    Raises:
        ConfigError: A number is out of range.
    """
    check_positive("fafed: rho", rho)
    check_second_moment("fafed", second_moment)
    if not 0 <= beta < 1:
        raise ConfigError(
            f"fafed: beta, what v keeps of its past, lies in [0, 1), found {beta}; the paper has 0.1 and 0.9",
            beta=beta,
        )
    if schedule == "theory":
        made: StepSizePlan = _theory(smoothness, devices, steps, batch, rho, h, w)
    elif schedule == "decaying":
        made = Decaying(lr, alpha, 1.0 if w is None else w, unit=decay_unit, epoch_steps=epoch_steps)
    else:
        made = Constant(lr, alpha)
    return Storm(
        "fafed",
        objective,
        made,
        batch,
        steps,
        opening_steps=opening_steps,
        clip=clip,
        ext=ext,
        adaptive={"beta": beta, "rho": rho},
        first_step=first_step,
        second_moment=second_moment,
        announced=_SCHEDULED,
    ).algorithm()


def _theory(
    smoothness: float | None,
    devices: int | None,
    steps: int,
    batch: int,
    rho: float,
    h: float | None,
    w: float | None,
) -> TheorySteps:
    if smoothness is None or devices is None:
        raise ConfigError(
            "fafed: the schedule 'theory' needs smoothness (L, a bound on the curvature) and devices (N); give both, or "
            f"take 'constant' or 'decaying'; found smoothness {smoothness}, devices {devices}",
            smoothness=smoothness,
            devices=devices,
        )
    return TheorySteps(smoothness, devices, steps, batch, rho, h, 1.5 if w is None else w)
