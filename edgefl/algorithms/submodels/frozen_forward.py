"""Forward pass of one chunk of frozen units, in several steps: EmbracingFL Algorithm 1 (embracingfl.md 2.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select
from edgefl.models.counters import counter_dtypes, round_counters
from edgefl.models.inputs import extra_inputs, input_tensors
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.spec import skeleton
from edgefl.models.tied import borrowed_names, collect_state
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.wire.bundle.manifest import SAMPLE


def chunk_forward(units: nn.Sequential, sample: TensorSpec, *, batch: int = 32) -> Function:
    """Return the forward pass of frozen units on a group of rows: from ``weights.*`` and ``batch.0.*`` to ``record.x``.

    A unit is a stage of the model; ``record.x`` is the output of the last one. ``batch.0.x`` is (batch, *sample); the
    units may read other inputs, too. Nothing is trained or changed (embracingfl.md 2.7): global batch norm uses its
    moving statistics, static batch norm uses the statistics of exactly these rows, and dropout is off. Tied weights
    that a later unit holds have the name that they have there.

    Args:
        units: Consecutive frozen units.
        sample: Spec of one input row, without the batch dimension.
        batch: Rows of a group.
    """
    bare = skeleton(units, training=False)
    weights = {name: TensorSpec.of(tensor) for name, tensor in collect_state(units).items()}
    lent = borrowed_names(units)

    def fn(tensors: Tensors) -> Tensors:
        read = select(tensors, "weights")
        own = {name: tensor for name, tensor in read.items() if name not in lent.values()}
        own |= {path: read[name] for path, name in lent.items()}
        with torch.no_grad(), TraceableMode(), restored_state(bare):
            batch = select(tensors, "batch.0")
            own |= round_counters(own, counter_dtypes(bare))
            out = torch.func.functional_call(bare, own | input_tensors(bare, batch), (batch["x"],))
        return {"record.x": cast(Tensor, out)}

    parts = {"x": sample, **extra_inputs(units)}
    batches = {name: each.rows(batch) for name, each in parts.items()}
    return Function("forward", fn, prefixed("weights", weights) | prefixed("batch.0", batches))


def multi_step_forward(
    chunks: Sequence[Function],
    weights: Mapping[str, Tensor],
    x: Tensor,
    others: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the activations of frozen units (stages of the model) for all rows of ``x``: (n, *output), in order
    (EmbracingFL Algorithm 1).

    Rows pass in consecutive groups of the chunk's batch. The last group is filled by wrap-around (rows 0, 1, ...),
    which matters for static batch norm.

    Args:
        chunks: Results of :func:`chunk_forward`, in order. Each reads the result of the one before.
        weights: Tensors by global name.
        x: Samples (n, *sample).
        others: Inputs besides x, (n, ...), by name.
    """
    record, beside = x, {SAMPLE: x, **(others or {})}
    for chunk in chunks:
        named = {name: weights[name.partition(".")[2]] for name in chunk.inputs if role_of(name) == "weights"}
        size = chunk.inputs["batch.0.x"].shape[0]
        groups = torch.arange(-(-len(x) // size) * size).remainder(len(x)).view(-1, size)
        read = {
            "x": record,
            **{name: each for name, each in beside.items() if f"batch.0.{name}" in chunk.inputs},
        }
        outputs = []
        for rows in groups:
            batch = {name: tensor[rows] for name, tensor in read.items()}
            outputs.append(chunk(named | prefixed("batch.0", batch))["record.x"])
        record = torch.cat(outputs)[: len(x)]
    return record
