"""The local step of most baselines: one gradient, a direction made of it, a move against the direction."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.ranges import above_zero
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.derivatives import gradient, norm
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, step_ports

Direction = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""(the step's inputs, the gradient by name) -> (direction by name, other state that the step leaves)."""
Specs = dict[str, TensorSpec]


def descent(
    objective: Objective,
    batch: int,
    direction: Direction,
    ports: Specs | None = None,
    *,
    clip: float | None = None,
) -> Function:
    """``y <- y - hyper.lr * direction(g(y; batch.0))`` for every trained tensor; moving statistics are those after the pass.

    ``ports`` are what the direction reads beside the weights. ``clip``: g is :func:`clipped` to that norm before the
    direction is made of it. Of a submodel that holds single entries of a tensor only those move.
    """

    def fn(tensors: Tensors) -> Tensors:
        weights, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        loss, correct, grads, moved = gradient(objective, weights, tensors)
        (grads,) = clipped(clip, grads)
        along, left = direction(tensors, grads)
        new = {name: weights[name] - tensors["hyper.lr"] * along[name] for name in objective.trainable}
        new = objective.carrier.confine(new, weights, gates)
        state = prefixed("state.weights", weights | new | moved) | left
        return state | {"metric.loss": loss, "metric.correct": correct}

    return Function("train", fn, step_ports(objective, batch) | (ports or {}) | {"hyper.lr": SCALAR})


def clipped(clip: float | None, *gradients: Tensors) -> tuple[Tensors, ...]:
    """All of them times min(1, clip / ||first||), the norm over all tensors; without ``clip`` as they are.

    One factor for all: two gradients whose difference matters stay comparable (fafed.md 8.11).
    """
    if clip is None:
        return gradients
    factor = clip / norm(gradients[0]).clamp_min(clip)
    return tuple({name: grad * factor for name, grad in grads.items()} for grads in gradients)


def check_clip(what: str, clip: float | None) -> None:
    """ConfigError, naming ``what`` has the option, unless ``clip`` is absent or a finite number above 0."""
    if clip is not None:
        above_zero(what, clip=clip)


def weight_ports(objective: Objective, *states: str) -> dict[str, TensorSpec]:
    """``weights.*``: the payload, and the server's ``states`` of the trained tensors beside it."""
    ports = prefixed("weights", objective.carrier.payload)
    for name in states:
        ports |= prefixed("weights", beside(name, trained_specs(objective)))
    return ports


def received_state(tensors: Tensors, state: str, objective: Objective) -> Tensors:
    """``weights.<state>/*`` by the name of the parameter."""
    return {name: tensors[f"weights.{state}/{name}"] for name in objective.trainable}


def root(second: Tensor, least: float = 0.0) -> Tensor:
    """The root of a second moment that is at least ``least``; rounding on its way may have left it below."""
    return second.clamp_min(least).sqrt()


def trained_specs(objective: Objective) -> dict[str, TensorSpec]:
    """Shape and dtype of every trained tensor."""
    return {name: objective.weights[name] for name in objective.trainable}
