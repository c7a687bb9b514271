"""FedAvg's local training, and two variants as baselines of personalization (per_fedavg.md 5)."""

from __future__ import annotations

from dataclasses import replace

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.baselines.steps import check_clip
from edgefl.algorithms.personalize import STEP, add_personalize
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.options import check_counts, check_not_negative
from edgefl.objective.objective import Objective


def fedavg(
    objective: Objective, *, batch: int = 32, steps: int = 10, lr: float = 0.05, clip: float | None = None
) -> Algorithm:
    """Return FedAvg: plain SGD on each device, and the mean of their models (McMahan et al. 2017).

    ``y <- y - lr g(y; B)``, ``steps`` times from the round's weights; ``x <- mean y``. It is ``sgd`` without momentum and
    without decay (fafed.md 3.1). ``clip``: g is scaled down to this norm over all tensors, ``g min(1, clip / |g|)``
    (fafed.md 4.4).

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'fedavg'", batch=batch)
    check_not_negative("algorithm 'fedavg'", steps=steps, lr=lr)
    check_clip("algorithm 'fedavg'", clip)
    algorithm = sgd(objective, batch=batch, steps=steps, lr=lr, momentum=0.0, weight_decay=0.0, clip=clip)
    return replace(algorithm, name="fedavg")


def fedavg_update(
    objective: Objective,
    *,
    batch: int = 40,
    steps: int = 10,
    lr: float = 0.001,
    alpha: float = STEP,
    clip: float | None = None,
) -> Algorithm:
    """Return FedAvg + update: FedAvg, whose model every user adapts by one SGD step of size ``alpha`` (per_fedavg.md 5).

    Training does not depend on ``alpha``. Every batch is drawn like the outer batch of per_fedavg, so both methods see the
    same samples. Both have the same ``lr`` by default (one beta for all, per_fedavg.md 3.3).

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step, and of the adapting step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        alpha: Step size of the adapting step, unless the server announces another (``hyper.alpha``).
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range.
    """
    algorithm = fedavg(objective, batch=batch, steps=steps, lr=lr, clip=clip)
    return replace(add_personalize(algorithm, objective, alpha=alpha), name="fedavg_update", draws="draw")


def fedavg_matched(
    objective: Objective,
    *,
    batch: int = 40,
    steps: int = 10,
    factor: int = 2,
    lr: float = 0.001,
    alpha: float = STEP,
    clip: float | None = None,
) -> Algorithm:
    """Return FedAvg with an adapting step, at as many gradients per round as per_fedavg: ``factor * steps`` local steps.

    It is the control for comparisons with per_fedavg, which takes 2 (FO) or 4 (HF) gradients in each of ``steps``
    steps (per_fedavg.md 5).

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step, and of the adapting step.
        steps: Steps of the per_fedavg to match.
        factor: Gradients of each of these steps: 2 (FO) or 4 (HF).
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        alpha: Step size of the adapting step, unless the server announces another (``hyper.alpha``).
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'fedavg_matched'", factor=factor)
    algorithm = fedavg_update(objective, batch=batch, steps=factor * steps, lr=lr, alpha=alpha, clip=clip)
    return replace(algorithm, name="fedavg_matched")
