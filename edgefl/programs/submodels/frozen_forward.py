"""One chunk of the multi-step forward pass: EmbracingFL Algorithm 1 (embracingfl.md 2.4)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, TensorSpec, select
from edgefl.models.spec import skeleton


def chunk_forward(units: nn.Sequential, sample: TensorSpec, *, batch: int = 32) -> Function:
    """Frozen units on a group of rows: ``weights.*``, ``batch.0.x`` (batch, *sample) -> ``record.x``.

    Nothing is trained or changed (embracingfl.md 2.7): global batch norm uses its moving statistics and leaves them alone,
    static batch norm uses the statistics of exactly these ``batch`` rows, dropout is off. ``sample`` is one input
    row, without the batch dimension.
    """
    bare = skeleton(units, training=False)
    weights = {name: TensorSpec.of(tensor) for name, tensor in units.state_dict().items()}

    def fn(tensors: Tensors) -> Tensors:
        with torch.no_grad():
            out = torch.func.functional_call(bare, select(tensors, "weights"), (tensors["batch.0.x"],))
        return {"record.x": cast(Tensor, out)}

    ports = {f"weights.{name}": spec for name, spec in weights.items()}
    ports["batch.0.x"] = sample.rows(batch)
    return Function("forward", fn, ports)
