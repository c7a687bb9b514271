"""Per-FedAvg as public re-implementations got it wrong (per_fedavg.md, end of 7), on the ports of the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.derivatives import gradient, shifted
from edgefl.objective.objective import Objective

Grads = Callable[[Tensors, int], Tensors]
Meta = Callable[[Grads, Tensors, Tensors, Tensor, Tensor], Tensors]
"""(gradient, w, gt, alpha, delta) -> what stands in G's place."""


def _quotient(grad: Grads, w: Tensors, along: Tensors, delta: Tensor) -> Tensors:
    ahead, behind = grad(shifted(w, along, delta), 2), grad(shifted(w, along, -delta), 2)
    return {name: (ahead[name] - behind[name]) / (2 * delta) for name in w}


def _ones(w: Tensors) -> Tensors:
    return {name: torch.ones_like(value) for name, value in w.items()}


def _along_ones(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    return shifted(gt, _quotient(grad, w, _ones(w), delta), -alpha)


def _elementwise(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    curvature = _quotient(grad, w, _ones(w), delta)
    return {name: gt[name] - alpha * curvature[name] * gt[name] for name in gt}


def _without_alpha(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    return shifted(gt, _quotient(grad, w, gt, delta), -torch.ones_like(alpha))


def _plus_twice(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    ahead, again = grad(shifted(w, gt, delta), 2), grad(shifted(w, gt, delta), 2)
    return {name: gt[name] - alpha * (ahead[name] - again[name]) / (2 * delta) for name in gt}


def _undivided(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    """The misprint: divided by delta, not by 2 delta (per_fedavg.md 8.1)."""
    return shifted(gt, _quotient(grad, w, gt, delta), -2 * alpha)


def _two_batches(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    """The gradient behind w is of D, that ahead of it of D''."""
    ahead, behind = grad(shifted(w, gt, delta), 2), grad(shifted(w, gt, -delta), 1)
    return {name: gt[name] - alpha * (ahead[name] - behind[name]) / (2 * delta) for name in gt}


def _first_order(grad: Grads, w: Tensors, gt: Tensors, alpha: Tensor, delta: Tensor) -> Tensors:
    return gt


WRONG: dict[str, Meta] = {
    "perturbed by ones": _along_ones,
    "curvature times gradient, entry by entry": _elementwise,
    "alpha forgotten": _without_alpha,
    "plus-perturbed twice": _plus_twice,
    "divided by delta": _undivided,
    "first order under the plain name": _first_order,
}
FROM_ADAPTED = "outer step from the adapted point"
TWO_BATCHES = "two batches for one quotient"


def wrong(kind: str, objective: Objective, **options: float) -> Algorithm:
    """HF with an absolute delta and one inner step, wrong as ``kind`` says."""
    right = per_fedavg(objective, mode="hf", **{"delta": 1e-3, **options})  # type: ignore[arg-type]
    meta = _two_batches if kind == TWO_BATCHES else WRONG.get(kind)

    def fn(tensors: Tensors) -> Tensors:
        w = select(tensors, "state.weights")
        alpha, delta = tensors["hyper.alpha"], tensors["hyper.delta"]

        def grad(at: Tensors, stream: int) -> Tensors:
            return gradient(objective, at, tensors, stream)[2]

        wt = shifted(w, grad(w, 1), -alpha)
        gt = grad(wt, 0)
        along = (
            shifted(gt, _quotient(grad, w, gt, delta), -alpha)
            if meta is None
            else meta(grad, w, gt, alpha, delta)
        )
        start = wt if kind == FROM_ADAPTED else w
        return prefixed("state.weights", shifted(start, along, -tensors["hyper.lr"]))

    step = Function("train", fn, right.phases[0].function.inputs)
    return replace(right, phases=(Phase("train", step, right.phases[0].steps),))
