"""Local step of most baselines: a gradient, a direction computed from it, and a step of the weights along it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.options import check_above_zero
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

    The pass updates moving statistics. If a submodel holds single entries of a tensor, only those move.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per step.
        direction: Function from (inputs of the step by port, gradient by name) to (direction by name, other new
            state by port).
        ports: Specs of the inputs of ``direction`` besides the weights, by port (input or output name).
        clip: Norm over all tensors to which g is scaled down first (:func:`clip_gradients`). None: no limit.
    """

    def fn(tensors: Tensors) -> Tensors:
        weights, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        loss, correct, grads, moved = gradient(objective, weights, tensors)
        (grads,) = clip_gradients(clip, grads)
        along, left = direction(tensors, grads)
        new = {name: weights[name] - tensors["hyper.lr"] * along[name] for name in objective.trainable}
        new = objective.carrier.confine(new, weights, gates)
        state = prefixed("state.weights", weights | new | moved) | left
        return state | {"metric.loss": loss, "metric.correct": correct}

    return Function("train", fn, step_ports(objective, batch) | (ports or {}) | {"hyper.lr": SCALAR})


def clip_gradients(clip: float | None, *gradients: Tensors) -> tuple[Tensors, ...]:
    """Return all ``gradients``, each multiplied by min(1, clip / norm of the first one over all its tensors).

    If ``clip`` is None, return them unchanged. All have the same factor, so that the difference of two gradients
    remains meaningful (fafed.md 8.11).
    """
    if clip is None:
        return gradients
    factor = clip / norm(gradients[0]).clamp_min(clip)
    return tuple({name: grad * factor for name, grad in grads.items()} for grads in gradients)


def check_clip(what: str, clip: float | None) -> None:
    """Raise ConfigError unless ``clip``, an option of ``what``, is None or a finite number above 0."""
    if clip is not None:
        check_above_zero(what, clip=clip)


def weight_ports(objective: Objective, *states: str) -> dict[str, TensorSpec]:
    """Return the specs of ``weights.*``, by port: all tensors that a device receives.

    Args:
        objective: Model part that a tier trains, with its loss.
        states: Names of server states. Each adds ``weights.<state>/<parameter>`` for every trained parameter.
    """
    ports = prefixed("weights", objective.carrier.payload)
    for name in states:
        ports |= prefixed("weights", beside(name, trained_specs(objective)))
    return ports


def received_state(tensors: Tensors, state: str, objective: Objective) -> Tensors:
    """Return the received tensors of the server state ``state``, by the name of the trained parameter.

    Args:
        tensors: Inputs of a function by port (input or output name), with ``weights.<state>/<parameter>``.
        state: Name of the state, such as ``m``.
        objective: Model part that a tier trains.
    """
    return {name: tensors[f"weights.{state}/{name}"] for name in objective.trainable}


def root(second: Tensor, least: float = 0.0) -> Tensor:
    """Return the square root of ``second``, clamped at ``least`` first, because rounding may have left it below."""
    return second.clamp_min(least).sqrt()


def trained_specs(objective: Objective) -> dict[str, TensorSpec]:
    """Return the spec of every trained tensor, by name."""
    return {name: objective.weights[name] for name in objective.trainable}
