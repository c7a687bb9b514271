"""One chunk of the multi-step forward pass: EmbracingFL Algorithm 1 (embracingfl.md 2.4)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.counters import as_integers, counters
from edgefl.models.inputs import extra_inputs, input_tensors
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.spec import skeleton
from edgefl.models.tied import borrowed, state_of
from edgefl.models.torch_functions.control_flow import TraceableMode


def chunk_forward(units: nn.Sequential, sample: TensorSpec, *, batch: int = 32) -> Function:
    """Frozen units on a group of rows: ``weights.*``, ``batch.0.x`` (batch, *sample), ``batch.0.*`` of the other inputs
    that they read -> ``record.x``.

    Nothing is trained or changed (embracingfl.md 2.7): global batch norm uses its moving statistics and leaves them alone,
    static batch norm uses the statistics of exactly these ``batch`` rows, dropout is off. ``sample`` is one input
    row, without the batch dimension. Tied weights that a later unit holds are read by its name for them.
    """
    bare = skeleton(units, training=False)
    weights = {name: TensorSpec.of(tensor) for name, tensor in state_of(units).items()}
    lent = borrowed(units)

    def fn(tensors: Tensors) -> Tensors:
        read = select(tensors, "weights")
        own = {name: tensor for name, tensor in read.items() if name not in lent.values()}
        own |= {path: read[name] for path, name in lent.items()}
        with torch.no_grad(), TraceableMode(), restored_state(bare):
            batch = select(tensors, "batch.0")
            own |= as_integers(own, counters(bare))
            out = torch.func.functional_call(bare, own | input_tensors(bare, batch), (batch["x"],))
        return {"record.x": cast(Tensor, out)}

    parts = {"x": sample, **extra_inputs(units)}
    batches = {name: each.rows(batch) for name, each in parts.items()}
    return Function("forward", fn, prefixed("weights", weights) | prefixed("batch.0", batches))
