"""SGD with momentum and decoupled ports: the local training of FedAvg and EmbracingFL (spec 2.5, 2.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from edgefl.programs.contract import Function, Phase, Program, Tensors, TensorSpec, prefixed, select
from edgefl.programs.objective import Objective

SCALAR = TensorSpec(())


def sgd(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    decay_all: bool = False,
    eval_batch: int | None = None,
) -> Program:
    """EmbracingFL Algorithm 2: ``steps`` momentum-SGD steps on the trained suffix, fresh buffers every round.

    Per trained tensor w with buffer v: ``v <- momentum*v + (g + weight_decay*w)``, ``w <- w - hyper.lr*v``.
    Decay acts on conv and dense kernels only (spec 8, row 12); ``decay_all`` extends it to every trained tensor.
    ``batch`` and ``eval_batch`` (default: ``batch``) are static in the graphs.
    """
    decayed = frozenset(objective.trainable) if decay_all else objective.kernels
    step = _step(objective, batch, momentum, weight_decay, decayed)
    return Program(
        name="sgd",
        start=_start(objective),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluate(objective, eval_batch or batch),
        hyper={"lr": lr},
    )


def _start(objective: Objective) -> Function:
    def fn(tensors: Tensors) -> Tensors:
        weights = select(tensors, "weights")
        buffers = {name: torch.zeros_like(weights[name]) for name in objective.trainable}
        return prefixed("state.weights", weights) | prefixed("state.momentum", buffers)

    return Function("start", fn, _named("weights", objective))


def _step(
    objective: Objective, batch: int, momentum: float, weight_decay: float, decayed: frozenset[str]
) -> Function:
    noise = objective.noise(batch)

    def fn(tensors: Tensors) -> Tensors:
        weights, velocity = select(tensors, "state.weights"), select(tensors, "state.momentum")
        loss, correct, grads, moved = gradient(objective, weights, tensors)
        for name in objective.trainable:
            w, g = weights[name], grads[name]
            velocity[name] = momentum * velocity[name] + (g + weight_decay * w if name in decayed else g)
            weights[name] = w - tensors["hyper.lr"] * velocity[name]
        state = prefixed("state.weights", weights | moved) | prefixed("state.momentum", velocity)
        return state | {"metric.loss": loss, "metric.correct": correct}

    trained = {f"state.momentum.{name}": objective.weights[name] for name in objective.trainable}
    ports = _named("state.weights", objective) | trained | batch_ports(objective, batch)
    ports |= {f"noise.{name}": spec for name, spec in noise.items()} | {"hyper.lr": SCALAR}
    return Function("train", fn, ports)


def gradient(
    objective: Objective, weights: Tensors, tensors: Tensors, index: int = 0
) -> tuple[Tensor, Tensor, Tensors, Tensors]:
    """(loss, correct, gradient by name, fixed tensors after the pass) at ``weights`` on ``batch.<index>``.

    Back-propagation ends at the boundary: ``batch.<index>.x`` needs no gradient.
    """
    noise = select(tensors, "noise")
    x, y = tensors[f"batch.{index}.x"], tensors[f"batch.{index}.y"]
    params = {name: weights[name] for name in objective.trainable}
    fixed = {name: weights[name] for name in objective.fixed}

    def loss_of(params: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
        loss, correct, moved = objective(params, fixed, x, y, noise)
        return loss, (loss.detach(), correct, moved)

    # torch.func rather than autograd.grad: the same function then also runs under vmap over clients.
    grads, (loss, correct, moved) = torch.func.grad(loss_of, has_aux=True)(params)
    return loss, correct, grads, moved


def finish(objective: Objective) -> Function:
    """``state.weights.*`` -> ``update.*``: every suffix tensor, moving statistics included."""

    def fn(tensors: Tensors) -> Tensors:
        return prefixed("update", select(tensors, "state.weights"))

    return Function("finish", fn, _named("state.weights", objective))


def evaluate(objective: Objective, batch: int) -> Function:
    """Inference of the suffix on a masked batch: sums over the rows whose ``batch.0.mask`` is 1 (0: padding)."""

    def fn(tensors: Tensors) -> Tensors:
        mask = tensors["batch.0.mask"]
        weights = select(tensors, "weights")
        losses, correct = objective.evaluate(weights, tensors["batch.0.x"], tensors["batch.0.y"])
        return {
            "metric.loss_sum": (losses * mask).sum(),
            "metric.correct": (correct * mask).sum(),
            "metric.count": mask.sum(),
        }

    ports = _named("weights", objective) | batch_ports(objective, batch)
    return Function("evaluate", fn, ports | {"batch.0.mask": TensorSpec((batch,))})


def batch_ports(objective: Objective, batch: int, index: int = 0) -> dict[str, TensorSpec]:
    """Ports of one labelled batch: features as the suffix reads them, labels as the loss does."""
    return {f"batch.{index}.x": objective.batch(batch), f"batch.{index}.y": objective.labels(batch)}


def _named(prefix: str, objective: Objective) -> dict[str, TensorSpec]:
    return {f"{prefix}.{name}": spec for name, spec in objective.weights.items()}
