"""SGD with momentum and decoupled ports: the local training of FedAvg and EmbracingFL (spec 2.5, 2.6)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from edgefl.programs.contract import Function, Phase, Program, Tensors, TensorSpec, prefixed, select
from edgefl.programs.objective import Objective, SelfDistillation

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
    masked_loss: bool = False,
    self_distillation: float | None = None,
    temperature: float = 1.0,
    eval_batch: int | None = None,
) -> Program:
    """EmbracingFL Algorithm 2: ``steps`` momentum-SGD steps on the trained suffix, fresh buffers every round.

    Per trained tensor w with buffer v: ``v <- momentum*v + (g + weight_decay*w)``, ``w <- w - hyper.lr*v``.
    Decay acts on conv and dense kernels only (spec 8, row 12); ``decay_all`` extends it to every trained tensor.
    Without momentum there are no buffers. ``masked_loss``: logits of classes that the device has no sample of are 0
    in training (HeteroFL). ``self_distillation``: the weight of :class:`SelfDistillation` at ``temperature`` (FjORD).
    ``batch`` and ``eval_batch`` (default: ``batch``) are static in the graphs.
    """
    if masked_loss:
        objective = replace(objective, masked=True)
    if self_distillation is not None:
        objective = replace(objective, distilled=SelfDistillation(self_distillation, temperature))
    decayed = frozenset(objective.trainable) if decay_all else objective.kernels
    step = _step(objective, batch, momentum, weight_decay, decayed)
    return Program(
        name="sgd",
        start=_start(objective, buffers=bool(momentum)),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluate(objective, eval_batch or batch),
        hyper={"lr": lr},
    )


def _start(objective: Objective, *, buffers: bool) -> Function:
    def fn(tensors: Tensors) -> Tensors:
        weights, gates = objective.carrier.unpack(select(tensors, "weights"))
        zeros = {name: torch.zeros_like(weights[name]) for name in objective.trainable if buffers}
        state = prefixed("state.weights", weights) | prefixed("state.gate", gates)
        return state | prefixed("state.momentum", zeros)

    return Function("start", fn, prefixed("weights", objective.carrier.payload))


def _step(
    objective: Objective, batch: int, momentum: float, weight_decay: float, decayed: frozenset[str]
) -> Function:
    noise = objective.noise(batch)

    def fn(tensors: Tensors) -> Tensors:
        weights, velocity = select(tensors, "state.weights"), select(tensors, "state.momentum")
        loss, correct, grads, moved = gradient(objective, weights, tensors)
        new = {}
        for name in objective.trainable:
            w, g = weights[name], grads[name]
            v = g + weight_decay * w if weight_decay and name in decayed else g
            if momentum:
                v = velocity[name] = momentum * velocity[name] + v
            new[name] = w - tensors["hyper.lr"] * v
        if momentum or weight_decay:  # which move entries that have no gradient
            new = objective.carrier.confine(new, weights, select(tensors, "state.gate"))
        state = prefixed("state.weights", weights | new | moved) | prefixed("state.momentum", velocity)
        return state | {"metric.loss": loss, "metric.correct": correct}

    ports = held_ports(objective) | batch_ports(objective, batch)
    if momentum:
        ports |= {f"state.momentum.{name}": objective.weights[name] for name in objective.trainable}
    ports |= prefixed("data", objective.facts) | prefixed("noise", noise) | {"hyper.lr": SCALAR}
    return Function("train", fn, ports)


def gradient(
    objective: Objective, weights: Tensors, tensors: Tensors, index: int = 0
) -> tuple[Tensor, Tensor, Tensors, Tensors]:
    """(loss, correct, gradient by name, fixed tensors after the pass) at ``weights`` on ``batch.<index>``.

    Back-propagation ends at the boundary: ``batch.<index>.x`` needs no gradient.
    """
    noise, gates, facts = (select(tensors, prefix) for prefix in ("noise", "state.gate", "data"))
    x, y = tensors[f"batch.{index}.x"], tensors[f"batch.{index}.y"]
    params = {name: weights[name] for name in objective.trainable}
    fixed = {name: weights[name] for name in objective.fixed}

    def loss_of(params: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
        loss, correct, moved = objective(params, fixed, x, y, noise, gates, facts)
        return loss, (loss.detach(), correct, moved)

    # torch.func rather than autograd.grad: the same function then also runs under vmap over clients.
    grads, (loss, correct, moved) = torch.func.grad(loss_of, has_aux=True)(params)
    return loss, correct, objective.carrier.descent(grads, params, gates), moved


def finish(objective: Objective) -> Function:
    """``state.weights.*`` -> ``update.*``: every suffix tensor, moving statistics included."""

    def fn(tensors: Tensors) -> Tensors:
        weights, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        return prefixed("update", objective.carrier.pack(weights, gates))

    return Function("finish", fn, held_ports(objective))


def evaluate(objective: Objective, batch: int) -> Function:
    """Inference of the suffix on a masked batch: sums over the rows whose ``batch.0.mask`` is 1 (0: padding)."""

    def fn(tensors: Tensors) -> Tensors:
        mask = tensors["batch.0.mask"]
        weights, gates = objective.carrier.unpack(select(tensors, "weights"))
        losses, correct = objective.evaluate(weights, tensors["batch.0.x"], tensors["batch.0.y"], gates)
        return {
            "metric.loss_sum": (losses * mask).sum(),
            "metric.correct": (correct * mask).sum(),
            "metric.count": mask.sum(),
        }

    ports = prefixed("weights", objective.carrier.payload) | batch_ports(objective, batch)
    return Function("evaluate", fn, ports | {"batch.0.mask": TensorSpec((batch,))})


def batch_ports(objective: Objective, batch: int, index: int = 0) -> dict[str, TensorSpec]:
    """Ports of one labelled batch: features as the suffix reads them, labels as the loss does."""
    return {f"batch.{index}.x": objective.batch(batch), f"batch.{index}.y": objective.labels(batch)}


def held_ports(objective: Objective) -> dict[str, TensorSpec]:
    """Ports of the weights in training, and of the gates beside them."""
    return prefixed("state.weights", objective.weights) | prefixed("state.gate", objective.carrier.gates)
