"""FedProx's local training: SGD with a proximal term towards the round's weights (Li et al. 2020)."""

from __future__ import annotations

from edgefl.algorithms.baselines.steps import check_clip, descent, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_counts, check_not_negative
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import begun, evaluate, finish


def fedprox(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    mu: float = 0.01,
    clip: float | None = None,
) -> Algorithm:
    """Return FedProx: FedAvg whose local loss has a pull to the round's weights, ``mu / 2 |y - x|^2`` (Li et al. 2020).

    ``y <- y - lr (g(y; B) + mu (y - x))`` with ``x`` the weights that the round began with; ``mu`` = 0 is FedAvg.
    ``clip``: g alone, without the pull, is scaled down to this norm over all tensors.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        mu: Weight of the proximal term, a constant of the graphs.
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'fedprox'", batch=batch)
    check_not_negative("algorithm 'fedprox'", steps=steps, lr=lr, mu=mu)
    check_clip("algorithm 'fedprox'", clip)

    def start(tensors: Tensors) -> Tensors:
        state = begun(objective, tensors)
        weights = select(state, "state.weights")
        return state | prefixed("state.anchor", {name: weights[name] for name in objective.trainable})

    def pulled(tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        y, x = select(tensors, "state.weights"), select(tensors, "state.anchor")
        return {name: g + mu * (y[name] - x[name]) for name, g in grads.items()}, {}

    step = descent(objective, batch, pulled, prefixed("state.anchor", trained_specs(objective)), clip=clip)
    return Algorithm(
        name="fedprox",
        start=Function("start", start, weight_ports(objective)),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
    )
