"""Threshold-controlled biased gradient descent: the local training of FIARSE (fiarse.md 2.4)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgefl.algorithms.baselines.adamw import adamw as local_adamw
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError
from edgefl.objective.carrier import ThresholdCarrier
from edgefl.objective.objective import Objective

BETA1, BETA2 = 0.9, 0.95
"""Betas of the paper's AdamW (fiarse.md 4.3)."""


def tcbgd(
    objective: Objective,
    *,
    batch: int = 20,
    steps: int = 100,
    lr: float = 0.05,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    remask: bool = True,
    bias: bool = True,
    freeze_dropped: bool = True,
    masked_loss: bool = False,
    adamw: bool = False,
) -> Algorithm:
    """Return FIARSE's local SGD on an importance submodel: the mask follows the weights, gradients flow through it.

    In each step M = M0 and |x| >= theta, and x moves by the loss's gradient at x * M, times M and 1 + 2 |x| theta / (|x| +
    theta)^2 (eq. 3). theta is constant. Defaults are the paper's batch and the released code's steps and learning rate
    (fiarse.md 4.3). On a submodel without thresholds, the full model included, it is plain SGD.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        momentum: Momentum of local SGD; its buffers are 0 at the start of a round.
        weight_decay: Weight decay of conv and dense kernels.
        remask: Compute M in each step. Without ``remask`` and ``bias`` this is pruning-greedy, like ``sgd`` (fiarse.md 2.5).
        bias: Multiply the gradient by the factor of eq. 3.
        freeze_dropped: Momentum and decay do not move entries that the mask dropped (fiarse.md A6).
        masked_loss: True: set logits of classes without local samples to 0 in training.
        adamw: AdamW along the same gradient instead of SGD, as in the paper for texts, with its betas (0.9, 0.95).

    Raises:
        ConfigError: Both ``adamw`` and ``momentum`` are set.
    """
    carrier = objective.carrier
    if isinstance(carrier, ThresholdCarrier):
        switched = carrier.with_switches(remask=remask, bias=bias, freeze_dropped=freeze_dropped)
        objective = replace(objective, carried=switched)
    if masked_loss:
        objective = replace(objective, masked=True)
    if adamw and momentum:
        raise ConfigError(
            f"algorithm 'tcbgd' has momentum {momentum:g} or adamw, which has its own: leave one of them out",
            momentum=momentum,
        )
    local = partial(local_adamw, beta1=BETA1, beta2=BETA2) if adamw else partial(sgd, momentum=momentum)
    algorithm = local(objective, batch=batch, steps=steps, lr=lr, weight_decay=weight_decay)
    return replace(algorithm, name="tcbgd")
