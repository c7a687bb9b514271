"""Derivatives of an objective at any weights on any of a step's batches, and a count of how many were taken.

Curvature only occurs as a product H(w, B) v, by name like the weights: exactly (:func:`hvp`) or as a quotient of
gradients (:func:`difference_hvp`). H is the Jacobian of the result of :func:`gradient`. That is the Hessian of
the mean loss, unless a carrier changes the gradient on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgefl.contract.tensors import Tensors, select
from edgefl.errors import ModelError
from edgefl.models.torch_functions.autograd_functions import differentiable
from edgefl.objective.objective import Objective


@dataclass
class Counts:
    """Number of gradients and of Hessian-vector products, each on one batch: the measure of compute in papers."""

    gradients: int = 0
    products: int = 0


_counts: ContextVar[Counts | None] = ContextVar("counts", default=None)


@contextmanager
def count_derivatives() -> Iterator[Counts]:
    """Yield counters of the gradients and Hessian-vector products that are computed inside the ``with`` block."""
    counts = Counts()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def gradient(
    objective: Objective, weights: Tensors, tensors: Tensors, index: int = 0
) -> tuple[Tensor, Tensor, Tensors, Tensors]:
    """Return loss, number of correct answers, gradient and moving statistics, at ``weights`` on one batch.

    Back-propagation ends at the boundary: ``batch.<index>.x`` gets no gradient. Counts one gradient in
    :func:`count_derivatives`.

    Args:
        objective: Model part that a tier trains, with its loss.
        weights: Tensors of floats by name, of the shapes of ``objective.weights``.
        tensors: All inputs of the step by port: ``batch.<index>.x`` (B, *sample), ``batch.<index>.y`` (B, *label),
            gates, noise and scalars.
        index: Number of the batch.

    Returns:
        (loss, correct, gradient, moved). The mean loss and the number of correct answers have shape (). The gradient
        is by name of the parameter, after :meth:`Carrier.descent`. ``moved`` has the tensors that are not trained, by
        name, such as moving statistics, as the pass left them.
    """
    if (counts := _counts.get()) is not None:
        counts.gradients += 1
    return _gradient(objective, weights, tensors, index)


def hvp(
    objective: Objective, weights: Tensors, tensors: Tensors, direction: Tensors, index: int = 0
) -> Tensors:
    """Return the exact Hessian-vector product H(w, B) v, by parameter name.

    Computes forward over reverse: the derivative of the gradient along v. Its exported graphs are as fast as those of
    other methods and need the least memory. It costs about two to three gradients.

    Args:
        objective: Model part that a tier trains, with its loss.
        weights: The weights w, by name.
        tensors: All inputs of the step by port (input or output name).
        direction: The vector v: one tensor for each name in ``objective.trainable``.
        index: Number of the batch B, ``batch.<index>``.

    Raises:
        ModelError: The model has an op that torch cannot differentiate in this way.
    """
    if (counts := _counts.get()) is not None:
        counts.products += 1

    def grads(params: Tensors) -> Tensors:
        return _gradient(objective, weights | params, tensors, index)[2]

    params = {name: weights[name] for name in objective.trainable}
    # The fused attention kernels of torch have no second derivative.
    try:
        with sdpa_kernel(SDPBackend.MATH):
            along: Tensors = torch.func.jvp(grads, (params,), (direction,))[1]
    except NotImplementedError as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"an exact Hessian-vector product does not exist for this model: {reason} Use a difference of gradients "
            "(mode 'hf' of per_fedavg), or another layer there",
            reason=reason,
        ) from error
    return along


def difference_hvp(
    objective: Objective, weights: Tensors, tensors: Tensors, direction: Tensors, h: Tensor, index: int = 0
) -> Tensors:
    """Return H(w, B) v by the central difference (g(w + h v, B) - g(w - h v, B)) / (2 h), by parameter name.

    Costs two gradients on one batch. The error is O(h^2) where third derivatives exist, plus rounding of the order of
    1 / h.

    Args:
        objective: Model part that a tier trains, with its loss.
        weights: The weights w, by name.
        tensors: All inputs of the step by port (input or output name).
        direction: The vector v, by name of the parameter.
        h: Step of the difference, shape ().
        index: Number of the batch B, ``batch.<index>``.
    """
    ahead, behind = (
        gradient(objective, weights | shift(weights, direction, by), tensors, index)[2] for by in (h, -h)
    )
    return {name: (ahead[name] - behind[name]) / (2 * h) for name in direction}


def shift(weights: Tensors, direction: Tensors, by: Tensor) -> Tensors:
    """Return ``weights`` + ``by`` * ``direction`` for the names in ``direction``.

    Other names of ``weights`` are left out.
    """
    return {name: weights[name] + by * along for name, along in direction.items()}


def norm(tensors: Tensors) -> Tensor:
    """Return the Euclidean norm () of all entries of all tensors together."""
    return torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum().sqrt()


def _gradient(
    objective: Objective, weights: Tensors, tensors: Tensors, index: int
) -> tuple[Tensor, Tensor, Tensors, Tensors]:
    """Return (loss, number of correct answers, gradient, moving statistics) as :func:`gradient` does, but without
    counting it in :func:`count_derivatives`.
    """
    noise, gates, facts = (select(tensors, prefix) for prefix in ("noise", "state.gate", "data"))
    hyper = {name: tensors[f"hyper.{name}"] for name in objective.scalars}
    batch = select(tensors, f"batch.{index}")
    x, y = batch["x"], batch["y"]
    params = {name: weights[name] for name in objective.trainable}
    fixed = {name: weights[name] for name in objective.fixed}

    def loss_of(params: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
        loss, correct, moved = objective(params, fixed, x, y, noise, gates, facts, hyper, batch)
        return loss, (loss.detach(), correct, moved)

    # torch.func rather than autograd.grad: the same function then also runs under vmap over clients.
    with differentiable():
        grads, (loss, correct, moved) = torch.func.grad(loss_of, has_aux=True)(params)
    return loss, correct, objective.carrier.descent(grads, params, gates), moved
