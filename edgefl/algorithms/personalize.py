"""Personalization: one step that adapts a model to a device's own data (per_fedavg.md 2.6)."""

from __future__ import annotations

from dataclasses import replace

import torch

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.options import check_not_negative
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.errors import ConfigError
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, batch_ports

ALPHA = "alpha"
"""Name of the step size, ``hyper.alpha``."""


def personalize(objective: Objective, batch: int) -> Function:
    """Return the function of one adapting step u <- u - hyper.alpha * g(u, batch.0), from ``weights.*`` to
    ``weights.*``.

    g is the mean gradient of ``objective``. The tensors are a round's payload (the received weights), as ``evaluate``
    reads them, so the result can be evaluated, and adapted again. In a submodel chosen by importance the held values
    move; mask and thresholds stay. It is a training step: dropout reads ``noise.*``, batch norm normalizes by the
    batch, and the pass updates its moving statistics. With alpha = 0 no tensor changes. ``metric.loss`` is the loss
    of the batch before the step. Momentum, decay and the codec of local training are not used.

    Args:
        objective: Model part and loss of the algorithm's ``evaluate``, so that binary or sparse weights are
            adapted as they are evaluated.
        batch: Samples of the batch.
    """
    carrier = objective.carrier

    def fn(tensors: Tensors) -> Tensors:
        payload, alpha = select(tensors, "weights"), tensors[f"hyper.{ALPHA}"]
        weights, gates = carrier.unpack(payload)
        loss, _, grads, moved = gradient(objective, weights, tensors | prefixed("state.gate", gates))
        stepped = {name: weights[name] - alpha * grads[name] for name in objective.trainable}
        for name in objective.buffers:
            stepped[name] = torch.where(alpha > 0, moved[name], weights[name])
        packed = carrier.pack(weights | stepped, gates)
        # Tensors that an update leaves out, such as masks and frozen ones, are returned as received.
        adapted = {name: packed.get(name, payload[name]) for name in carrier.payload}
        return prefixed("weights", adapted) | {"metric.loss": loss}

    ports = prefixed("weights", carrier.payload) | batch_ports(objective, batch)
    ports |= prefixed("data", objective.facts) | prefixed("noise", objective.noise(batch))
    return Function("personalize", fn, ports | {f"hyper.{ALPHA}": SCALAR})


STEP = 0.01
"""Default step size of personalization."""


def add_personalize(algorithm: Algorithm, objective: Objective, *, alpha: float = STEP) -> Algorithm:
    """Return ``algorithm`` with ``personalize``: one SGD step of size ``hyper.alpha`` on a batch of the training's size.

    Training and updates do not change. The files that a device downloads get one more graph.

    Args:
        algorithm: Algorithm without ``personalize``.
        objective: Model part and loss of its ``evaluate``.
        alpha: Step size, at least 0, unless the server announces another (``hyper.alpha``).

    Raises:
        ConfigError: The algorithm has ``personalize`` or a scalar ``alpha``, or its evaluation transforms the weights or
            reads private tensors, so that a plain step would adapt another model.
    """
    what = f"algorithm {algorithm.name!r}"
    check_not_negative(what, alpha=alpha)
    if algorithm.personalize is not None or ALPHA in algorithm.hyper:
        raise ConfigError(
            f"{what} has a scalar {ALPHA!r} of its own; leave out personal, and set it among the algorithm's options",
            algorithm=algorithm.name,
        )
    if algorithm.private:
        raise ConfigError(
            f"{what} keeps a part of the model on each device, and a plain step would adapt the server's, which stays "
            "untrained; leave out personal",
            algorithm=algorithm.name,
        )
    if algorithm.inference is not None:
        raise ConfigError(
            f"{what} computes with its weights in a form of its own, so a plain step would adapt another model than the one "
            "that is evaluated; leave out personal, or train by fedavg_update or per_fedavg",
            algorithm=algorithm.name,
        )
    batch = algorithm.phases[0].function.inputs["batch.0.x"].shape[0]
    return replace(
        algorithm, personalize=personalize(objective, batch), hyper={**algorithm.hyper, ALPHA: alpha}
    )
