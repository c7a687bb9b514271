"""Personalization: one step that adapts a model to a device's own data (per_fedavg.md 2.6)."""

from __future__ import annotations

import torch

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, batch_ports

ALPHA = "alpha"
"""Name of the step size, ``hyper.alpha``."""


def personalize(objective: Objective, batch: int) -> Function:
    """u <- u - hyper.alpha * g(u, batch.0), g the mean gradient of ``objective``: ``weights.*`` to ``weights.*``.

    The tensors are those of a round's payload, as ``evaluate`` reads them: what a step leaves can be evaluated, and stepped
    from again. Of a submodel chosen by importance the kept values move; mask and thresholds stay. It is a step of training:
    dropout draws from ``noise.*``, batch norm normalizes by the batch, and its moving statistics become those after the
    pass. With alpha = 0 all tensors come back as they were, moving statistics too. ``metric.loss`` is that of the batch
    before the step.

    ``objective`` has to be the one that the algorithm's ``evaluate`` has: binary or sparse weights are then adapted as they
    are read. Nothing else of local training takes part (momentum, decay, what an update is coded by).
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
        # What an update leaves out, such as masks and frozen tensors, is as it came.
        adapted = {name: packed.get(name, payload[name]) for name in carrier.payload}
        return prefixed("weights", adapted) | {"metric.loss": loss}

    ports = prefixed("weights", carrier.payload) | batch_ports(objective, batch)
    ports |= prefixed("data", objective.facts) | prefixed("noise", objective.noise(batch))
    return Function("personalize", fn, ports | {f"hyper.{ALPHA}": SCALAR})
