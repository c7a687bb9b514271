"""Per-FedAvg: every local step is an SGD step on the loss *after* adaptation (per_fedavg.md 2; Fallah et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from edgefl.algorithms.personalize import personalize
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_above_zero, check_counts, check_not_negative
from edgefl.contract.server import Schedule, constant
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.errors import ConfigError
from edgefl.objective.derivatives import difference_hvp, gradient, hvp, norm, shift
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, batch_ports, begun, evaluate, finish, held_ports

WHAT = "algorithm 'per_fedavg'"
OUTER = 0
"""Stream of the outer batch D', the one that FedAvg trains on."""
SMALLEST_NORM = 1e-12
DEFAULT_REACH = {torch.float32: 1e-2, torch.float64: 1e-4}
"""Default distance between weights for HF's difference, at which round-off and curvature leave most digits (per_fedavg.md
2.8).
"""

MODES = ("hf", "fo", "exact")
HESSIAN_BATCHES = ("independent", "inner")
SCHEDULES = ("constant", "diminishing")
Curvature = Callable[[Tensors, Tensors, Tensors, int], Tensors]
"""(weights, the step's inputs, direction v, stream) -> H(weights, batch.<stream>) v."""


@dataclass(frozen=True)
class BatchSizes:
    """Numbers of rows of the outer batch D', of each inner batch D and of each Hessian batch D''."""

    outer: int
    inner: int
    hessian: int


def per_fedavg(
    objective: Objective,
    *,
    batch: int = 40,
    steps: int = 10,
    lr: float = 0.001,
    alpha: float = 0.01,
    mode: str = "hf",
    delta: float | None = None,
    delta0: float | None = None,
    inner_steps: int = 1,
    hessian_batch: str = "independent",
    inner_batch: int | None = None,
    hessian_batch_size: int | None = None,
    schedule: Literal["constant", "diminishing"] = "constant",
) -> Algorithm:
    """Return Per-FedAvg: train a model that one SGD step on a user's own data adapts to that user (Fallah et al. 2020).

    ``steps`` times, on batches D', D, D'' drawn independently of each other (eqs. 6 to 8, 112, 120)::

        wt = w - alpha g(w, D);
        g~ = g(wt, D');
        G  = g~                            (mode "fo");
        G  = g~ - alpha H(w, D'') g~       (mode "exact");
        G  = g~ - alpha (g(w + h g~, D'') - g(w - h g~, D'')) / 2h          (mode "hf");
        w <- w - lr G;

    and the mean of the users' models, each of equal weight. With m = ``inner_steps`` there are w_0 = w, ..., w_m. Then g~ is
    the gradient at w_m, and G = J_0 ... J_(m-1) g~ with J_j v = v - alpha H(w_j) v, from right to left (per_fedavg.md 2.6).

    D' is stream ``batch.0``; D and D'' of inner step j = 0, 1, ... are ``batch.<2j+1>`` and ``batch.<2j+2>``. Metrics and
    moving statistics come from the outer pass. Dropout drops the same entries in all passes of a step: they belong to one
    function of w.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Rows of D'.
        steps: Local steps per round.
        lr: Outer step size beta, a scalar of the round.
        alpha: Inner step size, a scalar of the round.
        mode: "hf", "fo" or "exact".
        delta: h of HF, the paper's form, a scalar of the round.
        delta0: h of HF times the norm of the vector that it multiplies. Default: 1e-2 in float32, 1e-4 in float64.
        inner_steps: Inner steps m.
        hessian_batch: "independent", or "inner": H on the batch of the inner step, so that "exact" is the gradient of
            w -> loss(wt, D') itself.
        inner_batch: Rows of D. Default: ``batch``.
        hessian_batch_size: Rows of D''. Default: ``batch``.
        schedule: "diminishing": round k = 1, 2, ... has beta_k = ``lr`` / sqrt(k), the O(1 / sqrt(steps k)) of Remark G.1.
            It replaces ``round.lr_decay_at`` of a federation file: choose one of the two.

    Raises:
        ConfigError: A value is out of range.
    """
    mode = _check_choice("mode", mode.lower(), MODES)
    _check_choice("hessian_batch", hessian_batch, HESSIAN_BATCHES)
    _check_choice("schedule", schedule, SCHEDULES)
    sizes = BatchSizes(
        batch,
        batch if inner_batch is None else inner_batch,
        batch if hessian_batch_size is None else hessian_batch_size,
    )
    check_counts(
        WHAT, batch=batch, inner_steps=inner_steps, inner_batch=sizes.inner, hessian_batch_size=sizes.hessian
    )
    check_not_negative(WHAT, steps=steps, lr=lr, alpha=alpha)
    reach = _reach_scalar(objective, delta, delta0) if mode == "hf" else {}
    curvature = _curvature(objective, mode, next(iter(reach), ""))
    offset = 2 if hessian_batch == "independent" else 1
    step = _step(objective, sizes, inner_steps, curvature, offset, tuple(reach))
    return Algorithm(
        name="per_fedavg",
        start=Function("start", partial(begun, objective), prefixed("weights", objective.carrier.payload)),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluate(objective, batch),
        personalize=personalize(objective, batch),
        hyper={"lr": lr, "alpha": alpha, **reach},
        schedule=_diminishing_schedule(lr) if schedule == "diminishing" else constant,
        announced=frozenset({"schedule"}),
        draws="draw",
    )


def _diminishing_schedule(lr: float) -> Schedule:
    return lambda position, _rounds: {"lr": lr / math.sqrt(position + 1)}


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(
            f"{WHAT}: {name} is {value!r}; set it to one of {', '.join(known)}", option=name, value=value
        )
    return value


def _reach_scalar(objective: Objective, delta: float | None, delta0: float | None) -> dict[str, float]:
    """Return {"delta": delta} or {"delta0": delta0}: the scalar that decides the step h of mode "hf", by name.

    If neither is set, return the default of ``delta0`` for the dtype of the weights.

    Raises:
        ConfigError: Both are given, or the number is not above 0.
    """
    if delta is not None and delta0 is not None:
        raise ConfigError(
            f"{WHAT}: delta is {delta!r} and delta0 is {delta0!r}; set the absolute step, delta, or the scale-free one, "
            "delta0, not both",
            delta=delta,
            delta0=delta0,
        )
    if delta is not None:
        check_above_zero(WHAT, delta=delta)
        return {"delta": delta}
    dtype = objective.weights[objective.trainable[0]].dtype
    reach = DEFAULT_REACH.get(dtype, DEFAULT_REACH[torch.float32]) if delta0 is None else delta0
    check_above_zero(WHAT, delta0=reach)
    return {"delta0": reach}


def _curvature(objective: Objective, mode: str, reach: str) -> Curvature | None:
    """Return the function that computes H v, or None in mode "fo".

    It maps (weights, inputs of the step by port, v, index of the batch) to H v by name.

    Args:
        objective: Model part that a tier trains, with its loss.
        mode: "fo", "exact" or "hf".
        reach: Name of the scalar that decides h: "delta" or "delta0".
    """
    if mode == "fo":
        return None
    if mode == "exact":
        return lambda weights, given, along, stream: hvp(objective, weights, given, along, stream)

    def quotient(weights: Tensors, given: Tensors, along: Tensors, stream: int) -> Tensors:
        h = given[f"hyper.{reach}"]
        if reach == "delta0":
            h = h / norm(along).clamp_min(SMALLEST_NORM)
        return difference_hvp(objective, weights, given, along, h, stream)

    return quotient


def _step(
    objective: Objective,
    sizes: BatchSizes,
    inner_steps: int,
    curvature: Curvature | None,
    offset: int,
    reach: tuple[str, ...],
) -> Function:
    """Return the local step as a function of the algorithm.

    Args:
        objective: Model part that a tier trains, with its loss.
        sizes: Rows of each batch.
        inner_steps: Number of inner steps.
        curvature: Function that computes H v (:func:`_curvature`). None: mode "fo".
        offset: The Hessian of inner step j reads ``batch.<2j + offset>``.
        reach: Names of the scalars that ``curvature`` reads.
    """

    def fn(tensors: Tensors) -> Tensors:
        weights, alpha = select(tensors, "state.weights"), tensors["hyper.alpha"]
        points = [weights]
        for j in range(inner_steps):
            grads = gradient(objective, points[j], tensors, 2 * j + 1)[2]
            points.append(weights | shift(points[j], grads, -alpha))
        loss, correct, meta, moved = gradient(objective, points.pop(), tensors, OUTER)
        if curvature is not None:
            for j in reversed(range(inner_steps)):
                meta = shift(meta, curvature(points[j], tensors, meta, 2 * j + offset), -alpha)
        new = objective.carrier.confine(
            shift(weights, meta, -tensors["hyper.lr"]), weights, select(tensors, "state.gate")
        )
        state = prefixed("state.weights", weights | new | moved)
        return state | {"metric.loss": loss, "metric.correct": correct}

    hessians = curvature is not None and offset == 2
    scalars = {f"hyper.{name}": SCALAR for name in ("lr", "alpha", *reach)}
    return Function("train", fn, _ports(objective, sizes, inner_steps, hessians) | scalars)


def _ports(
    objective: Objective, sizes: BatchSizes, inner_steps: int, hessians: bool
) -> dict[str, TensorSpec]:
    ports = held_ports(objective) | batch_ports(objective, sizes.outer, OUTER)
    for j in range(inner_steps):
        ports |= batch_ports(objective, sizes.inner, 2 * j + 1)
        if hessians:
            ports |= batch_ports(objective, sizes.hessian, 2 * j + 2)
    noise = objective.noise(sizes.outer)
    others = {sizes.inner, sizes.hessian} if hessians else {sizes.inner}
    if any(objective.noise(size) != noise for size in others):
        raise ConfigError(
            f"{WHAT}: batches of {sizes.outer}, {sizes.inner} and {sizes.hessian} rows cannot share the noise of the "
            "model's dropout; leave out inner_batch and hessian_batch_size",
            sizes=sizes,
        )
    return ports | prefixed("data", objective.facts) | prefixed("noise", noise)
