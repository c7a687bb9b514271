"""Local only: every device trains a model of its own and sends nothing, the baseline without a federation."""

from __future__ import annotations

import torch

from edgefl.algorithms.baselines.steps import descent, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_counts, check_not_negative
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, dtype_of, evaluate, held_ports


def local(objective: Objective, *, batch: int = 32, steps: int = 10, lr: float = 0.05) -> Algorithm:
    """Return Local only: every device continues with its own last model and sends nothing (per_fedavg.md 5).

    A device begins with the server's weights in its first round, then with those in its carry, moving statistics included.
    An update holds no tensor, so the server's model and its evaluation stay the initial ones. A round reports the training
    loss of the devices' own models in the metrics of their steps. A user's own model is in its carry, as ``model.<name>``.
    For its accuracy, call ``evaluate`` with these as ``weights.<name>`` on that user's test samples. A simulation can do
    that; a server, which receives no carry, cannot.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'local'", batch=batch)
    check_not_negative("algorithm 'local'", steps=steps, lr=lr)
    begun_port = {"carry.begun": SCALAR}

    def start(tensors: Tensors) -> Tensors:
        state, own = begun(objective, tensors), select(tensors, "carry.model")
        weights, has = select(state, "state.weights"), tensors["carry.begun"] > 0.5
        return state | prefixed("state.weights", {n: torch.where(has, own[n], w) for n, w in weights.items()})

    def finish(tensors: Tensors) -> Tensors:
        left = prefixed("carry.model", select(tensors, "state.weights"))
        return left | {"carry.begun": torch.ones((), dtype=dtype_of(objective, tensors))}

    ports = weight_ports(objective) | prefixed("carry.model", objective.weights) | begun_port
    return Algorithm(
        name="local",
        start=Function("start", start, ports),
        phases=(Phase("train", descent(objective, batch, lambda _, grads: (grads, {})), steps),),
        finish=Function("finish", finish, held_ports(objective)),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
    )
