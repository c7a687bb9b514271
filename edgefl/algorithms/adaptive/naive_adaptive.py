"""Naive adaptive FedAvg: adaptive steps per device, averaged models. FAFED's counter-example."""

from __future__ import annotations

import torch

from edgefl.algorithms.adaptive.schedules import check_positive
from edgefl.algorithms.baselines.steps import trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.errors import ConfigError
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, evaluate, held_ports, pack, step_ports


def naive_adaptive(
    objective: Objective, *, batch: int = 32, steps: int = 10, lr: float = 0.01, beta: float = 0.9
) -> Algorithm:
    """Return Naive adaptive FedAvg: every device has a preconditioner of its own (fafed.md 2.2, Algorithm 1).

    FAFED's paper shows that it fails. With the device's own v, which starts at 0 and is never averaged, every step is::

        v <- beta v + (1 - beta) g^2
        x <- x - lr g / sqrt(v),  0/0 := 0

    and x is averaged every ``steps`` steps. Dividing by v removes the weight of devices with large gradients. So the models
    may move away from every stationary point of the mean objective, for any lr and beta.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Step size, a scalar of the round; above 0.
        beta: Decay of v, a scalar of the round, in [0, 1).

    Raises:
        ConfigError: A number is out of range.
    """
    check_positive("naive_adaptive: lr", lr)
    if not 0 <= beta < 1:
        raise ConfigError(
            f"naive_adaptive: beta, what v keeps of its past, lies in [0, 1), found {beta}", beta=beta
        )
    for name, value in {"batch": batch, "steps": steps}.items():
        if value < 1:
            raise ConfigError(f"naive_adaptive: {name} is at least 1, found {value}; raise it", value=value)
    return Algorithm(
        name="naive_adaptive",
        start=_start(objective),
        phases=(Phase("train", _train(objective, batch), steps),),
        finish=_finish(objective),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr, "beta": beta},
    )


def _start(objective: Objective) -> Function:
    def fn(given: Tensors) -> Tensors:
        return begun(objective, given) | prefixed("state.v", select(given, "carry.v"))

    return Function("start", fn, weight_ports(objective) | prefixed("carry.v", trained_specs(objective)))


def _train(objective: Objective, batch: int) -> Function:
    def fn(given: Tensors) -> Tensors:
        weights, v = select(given, "state.weights"), select(given, "state.v")
        loss, correct, grads, statistics = gradient(objective, weights, given)
        beta, new = given["hyper.beta"], {}
        for name in objective.trainable:
            v[name] = beta * v[name] + (1 - beta) * grads[name].square()
            nothing = v[name] <= 0
            root = torch.where(nothing, torch.ones_like(v[name]), v[name]).sqrt()
            move = torch.where(nothing, torch.zeros_like(root), grads[name] / root)
            new[name] = weights[name] - given["hyper.lr"] * move
        state = prefixed("state.weights", weights | new | statistics) | prefixed("state.v", v)
        return state | {"metric.loss": loss, "metric.correct": correct}

    ports = step_ports(objective, batch) | {"hyper.lr": SCALAR, "hyper.beta": SCALAR}
    return Function("train", fn, ports | prefixed("state.v", trained_specs(objective)))


def _finish(objective: Objective) -> Function:
    def fn(given: Tensors) -> Tensors:
        return pack(objective, given) | prefixed("carry.v", select(given, "state.v"))

    return Function("finish", fn, held_ports(objective) | prefixed("state.v", trained_specs(objective)))
