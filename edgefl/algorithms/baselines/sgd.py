"""SGD with momentum and decoupled ports: the local training of FedAvg and EmbracingFL (embracingfl.md 2.5, 2.6)."""

from __future__ import annotations

from dataclasses import replace

import torch

from edgefl.algorithms.baselines.steps import check_clip, clip_gradients, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective, SelfDistillation
from edgefl.objective.parts import SCALAR, begun, evaluate, finish, step_ports


def sgd(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    decay_all: bool = False,
    masked_loss: bool = False,
    self_distillation: float | None = None,
    temperature: float = 1.0,
    clip: float | None = None,
) -> Algorithm:
    """Return SGD with momentum, fresh buffers every round (EmbracingFL Algorithm 2 on the trained suffix).

    Per trained tensor w with buffer v: ``v <- momentum*v + (g + weight_decay*w)``, ``w <- w - hyper.lr*v``. Without
    momentum there are no buffers.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step, static in the graphs.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        momentum: Momentum of the buffers.
        weight_decay: Decay of conv and dense kernels (embracingfl.md 8, row 12).
        decay_all: True: decay every trained tensor.
        masked_loss: True: set logits of classes without local samples to 0 in training (HeteroFL).
        self_distillation: Weight of :class:`SelfDistillation` (FjORD). None: off.
        temperature: Temperature of the distillation.
        clip: Norm over all tensors to which g is scaled down, ``g min(1, clip / |g|)``, before decay and momentum. None:
            no limit.

    Raises:
        ConfigError: ``clip`` is not above 0.
        ModelError: The loss cannot be combined with ``masked_loss`` or ``self_distillation``, or a number of the latter is
            out of range.
    """
    check_clip("algorithm 'sgd'", clip)
    if masked_loss:
        objective = replace(objective, masked=True)
    if self_distillation is not None:
        objective = replace(objective, distilled=SelfDistillation(self_distillation, temperature))
    decayed = frozenset(objective.trainable) if decay_all else objective.kernels
    step = sgd_step(
        objective, batch, momentum=momentum, weight_decay=weight_decay, decayed=decayed, clip=clip
    )
    return Algorithm(
        name="sgd",
        start=_start(objective, buffers=bool(momentum)),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
    )


def _start(objective: Objective, *, buffers: bool) -> Function:
    def fn(tensors: Tensors) -> Tensors:
        state = begun(objective, tensors)
        weights = select(state, "state.weights")
        zeros = {name: torch.zeros_like(weights[name]) for name in objective.trainable if buffers}
        return state | prefixed("state.momentum", zeros)

    return Function("start", fn, weight_ports(objective))


def sgd_step(
    objective: Objective,
    batch: int,
    *,
    momentum: float,
    weight_decay: float = 0.0,
    decayed: frozenset[str] = frozenset(),
    clip: float | None = None,
    phase: str = "train",
    part: frozenset[str] | None = None,
) -> Function:
    """Return the step of :func:`sgd`.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per step.
        momentum: Momentum of the buffers.
        weight_decay: Decay of the tensors ``decayed``.
        decayed: Names of decayed tensors.
        clip: Norm to which g is scaled down. None: no limit.
        phase: Name of the function.
        part: Names of the parameters and buffers that move; the others are fixed. None: all.
    """
    trained = [each for each in objective.trainable if part is None or each in part]

    def fn(tensors: Tensors) -> Tensors:
        weights, velocity = select(tensors, "state.weights"), select(tensors, "state.momentum")
        loss, correct, grads, moved = gradient(objective, weights, tensors)
        unmoved = weights
        if part is not None:
            grads, unmoved = {each: grads[each] for each in trained}, {}
            moved = {each: tensor for each, tensor in moved.items() if each in part}
        (grads,) = clip_gradients(clip, grads)
        new = {}
        for name in trained:
            w, g = weights[name], grads[name]
            v = g + weight_decay * w if weight_decay and name in decayed else g
            if momentum:
                v = velocity[name] = momentum * velocity[name] + v
            new[name] = w - tensors["hyper.lr"] * v
        if momentum or weight_decay:  # these move entries without a gradient
            new = objective.carrier.confine(new, weights, select(tensors, "state.gate"))
        state = prefixed("state.weights", unmoved | new | moved) | prefixed("state.momentum", velocity)
        return state | {"metric.loss": loss, "metric.correct": correct}

    ports = step_ports(objective, batch) | {"hyper.lr": SCALAR}
    if momentum:
        ports |= prefixed("state.momentum", {each: objective.weights[each] for each in trained})
    return Function(phase, fn, ports)
