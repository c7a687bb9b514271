"""Local step of most baselines: a gradient, a direction computed from it, and a move against the direction."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.options import above_zero
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.derivatives import gradient, norm
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, step_ports

Direction = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""(the step's inputs, the gradient by name) -> (direction by name, other state of the step)."""
Specs = dict[str, TensorSpec]


def descent(
    objective: Objective,
    batch: int,
    direction: Direction,
    ports: Specs | None = None,
    *,
    clip: float | None = None,
) -> Function:
    """Return the step ``y <- y - hyper.lr * direction(g(y; batch.0))`` of every trained tensor.

    Moving statistics are updated by the pass. If a submodel holds single entries of a tensor, only those move.

    Args:
        objective: Objective.
        batch: Samples per step.
        direction: Computes the direction from the gradient.
        ports: Inputs of the direction besides the weights.
        clip: Norm to which g is :func:`clipped` first.
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
    """Return all gradients times min(1, clip / ||first||), the norm over all tensors. Without ``clip`` they are unchanged.

    One factor for all: two gradients whose difference matters stay comparable (fafed.md 8.11).
    """
    if clip is None:
        return gradients
    factor = clip / norm(gradients[0]).clamp_min(clip)
    return tuple({name: grad * factor for name, grad in grads.items()} for grads in gradients)


def check_clip(what: str, clip: float | None) -> None:
    """Raise ConfigError, naming ``what`` has the option, unless ``clip`` is None or a finite number above 0."""
    if clip is not None:
        above_zero(what, clip=clip)


def weight_ports(objective: Objective, *states: str) -> dict[str, TensorSpec]:
    """Return the ports ``weights.*``: the payload, and the server's ``states`` of the trained tensors."""
    ports = prefixed("weights", objective.carrier.payload)
    for name in states:
        ports |= prefixed("weights", beside(name, trained_specs(objective)))
    return ports


def received_state(tensors: Tensors, state: str, objective: Objective) -> Tensors:
    """Return ``weights.<state>/*`` by the name of the parameter."""
    return {name: tensors[f"weights.{state}/{name}"] for name in objective.trainable}


def root(second: Tensor, least: float = 0.0) -> Tensor:
    """Return the root of a second moment, clamped at ``least``, because rounding may have left it below."""
    return second.clamp_min(least).sqrt()


def trained_specs(objective: Objective) -> dict[str, TensorSpec]:
    """Return the spec of every trained tensor."""
    return {name: objective.weights[name] for name in objective.trainable}
