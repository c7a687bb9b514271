"""Parts that most algorithms share: the start of a round, the ports of a step, the update, the evaluation."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial, reduce

import torch

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.wire.metrics import LOSS

SCALAR = TensorSpec(())
PRIVATE, BEGUN = "carry.private", "carry.begun"
"""Ports of the private tensors that a device stored, and of a scalar: 1 if they are stored, 0 if not."""


def begun(objective: Objective, tensors: Tensors) -> Tensors:
    """Return the state that local steps train, unpacked from the tensors that the device received.

    Args:
        objective: The objective of training.
        tensors: The round's ``weights.*`` by port (input or output name), of the payload's shapes and dtypes. Others,
            such as the server's state, are ignored.

    Returns:
        ``state.weights.*`` and ``state.gate.*``, by port.
    """
    payload = {name: tensors[f"weights.{name}"] for name in objective.carrier.payload}
    weights, gates = objective.carrier.unpack(payload)
    return prefixed("state.weights", weights) | prefixed("state.gate", gates)


def dtype_of(objective: Objective, state: Tensors) -> torch.dtype:
    """Return the dtype in which a step computes: that of ``state.weights.*``. It is float64 in some simulations."""
    return state[f"state.weights.{objective.trainable[0]}"].dtype


def pack(objective: Objective, tensors: Tensors) -> Tensors:
    """Return all tensors of the trained units as a device sends them, as ``update.*``; moving statistics are included.

    ``tensors`` has ``state.weights.*`` and ``state.gate.*`` (masks and thresholds).
    """
    weights, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
    return prefixed("update", objective.carrier.pack(weights, gates))


def finish(objective: Objective) -> Function:
    """Return the function ``finish`` for a device that sends the trained weights of ``objective`` and nothing else."""
    return Function("finish", partial(pack, objective), held_ports(objective))


def private_ports(objective: Objective, private: Collection[str]) -> dict[str, TensorSpec]:
    """Return the specs of ``carry.private.*``, the state that keeps the tensors ``private`` on a device between rounds.

    They are by port (input or output name); {} if there are no private tensors.
    """
    if not private:
        return {}
    specs = {name: spec for name, spec in objective.weights.items() if name in private}
    dtype = objective.weights[objective.trainable[0]].dtype
    return prefixed(PRIVATE, specs) | {BEGUN: TensorSpec((), dtype, below=2)}


def restore_private(tensors: Tensors, state: Tensors) -> Tensors:
    """Return ``state`` with the private tensors of the device's carry instead of the received ones.

    Args:
        tensors: Inputs of ``start``. Private tensors are ``carry.private.<name>``; ``carry.begun`` is 0 on a device that
            stored none, which keeps the received ones.
        state: State at the start of the round: ``state.weights.*`` (:func:`begun`) and others.
    """
    is_stored = tensors[BEGUN] > 0.5
    own = prefixed("state.weights", select(tensors, PRIVATE))
    return state | {name: torch.where(is_stored, tensor, state[name]) for name, tensor in own.items()}


def store_private(objective: Objective, private: Collection[str], tensors: Tensors) -> Tensors:
    """Return the tensors ``private`` of ``state.weights.*`` as ``carry.private.*``, which the device stores for its
    next round.

    They are by port (input or output name); {} if there are no private tensors. ``carry.begun`` is 0 if an entry is not
    finite: the next round then begins with the server's tensors.
    """
    if not private:
        return {}
    own = {name: tensor for name, tensor in select(tensors, "state.weights").items() if name in private}
    total = reduce(torch.add, [tensor.sum() for tensor in own.values()])
    is_finite = total.abs() <= torch.finfo(total.dtype).max  # false for NaN too
    return prefixed(PRIVATE, own) | {BEGUN: is_finite.to(dtype_of(objective, tensors))}


def evaluate(objective: Objective, batch: int) -> Function:
    """Return the function that evaluates ``objective`` on ``batch`` rows. Rows whose ``batch.0.mask`` is 0 are padding.

    Its inputs are ``weights.*`` (the payload) and ``batch.0.*``. Its outputs are the sums ``metric.loss_sum``,
    ``metric.correct``, ``metric.count``, and the other terms of the loss's metrics
    (:func:`edgefl.models.losses.loss.sums_of`).
    """

    def fn(tensors: Tensors) -> Tensors:
        mask = tensors["batch.0.mask"]
        weights, gates = objective.carrier.unpack(select(tensors, "weights"))
        batch = select(tensors, "batch.0")
        return prefixed("metric", objective.evaluate(weights, batch["x"], batch["y"], mask, gates, batch))

    ports = prefixed("weights", objective.carrier.payload) | batch_ports(objective, batch)
    ports |= {"batch.0.mask": TensorSpec((batch,))}
    return Function("evaluate", fn, ports, metrics=(*objective.metrics, LOSS))


def inference(objective: Objective) -> Function:
    """Return the function from the received ``weights.*`` to the ``weights.*`` that the layers use in inference.

    They differ if the submodel masks weights.
    """

    def fn(tensors: Tensors) -> Tensors:
        weights, gates = objective.carrier.unpack(select(tensors, "weights"))
        return prefixed("weights", weights | objective.carrier.effective(weights, gates, {}, training=False))

    return Function("inference", fn, prefixed("weights", objective.carrier.payload))


def batch_ports(objective: Objective, batch: int, index: int = 0) -> dict[str, TensorSpec]:
    """Return the specs of batch number ``index`` by port (input or output name), for ``batch`` rows.

    ``batch.<index>.x`` are features, ``batch.<index>.y`` labels, and the others additional inputs of the model part.
    """
    parts = {"x": objective.batch(batch), **objective.others(batch), "y": objective.labels(batch)}
    return prefixed(f"batch.{index}", parts)


def held_ports(objective: Objective) -> dict[str, TensorSpec]:
    """Return the specs of the state of local training of ``objective``, by port (input or output name).

    They are ``state.weights.*`` and ``state.gate.*`` (masks and thresholds).
    """
    return prefixed("state.weights", objective.weights) | prefixed("state.gate", objective.carrier.gates)


def step_ports(objective: Objective, batch: int, streams: int = 1) -> dict[str, TensorSpec]:
    """Return the specs of the inputs of a step that takes gradients of ``objective``, by port (input or output name).

    They are ``state.weights.*``, ``state.gate.*`` (masks and thresholds), ``batch.0`` to ``batch.<streams - 1>``,
    ``data.*``, ``noise.*``, and ``hyper.*``, the scalars that the loss reads.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples of each batch.
        streams: Number of independent batches per step.
    """
    ports = held_ports(objective) | {f"hyper.{name}": SCALAR for name in objective.scalars}
    for index in range(streams):
        ports |= batch_ports(objective, batch, index)
    return ports | prefixed("data", objective.facts) | prefixed("noise", objective.noise(batch))
