"""What a model costs to run: multiplications, counted on a run without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import on_meta, without_values
from edgefl.submodels.channels.trace import plain_attention

_ROWS = 2


def macs(module: nn.Sequential, sample: TensorSpec) -> int:
    """Multiply-accumulate operations of products, convolutions and recurrent layers, for one sample's forward pass."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which only who counts waits for

    bare = on_meta(module).eval()
    x = torch.empty((_ROWS, *sample.shape), dtype=sample.dtype, device="meta")
    with (
        without_values(bare),
        plain_attention(),
        FlopCounterMode(display=False, custom_mapping=_CELLS) as counter,
    ):
        bare(x)
    return int(counter.get_total_flops()) // (2 * _ROWS)


def _cells(x: Any, kernel: Any, recurrent: Any, *_rest: Any, **_kwargs: Any) -> int:
    steps, batch, _ = x
    return int(2 * steps * batch * (kernel[0] * kernel[1] + recurrent[0] * recurrent[1]))


_CELLS = {torch.ops.edgefl.lstm_cells: _cells, torch.ops.edgefl.gru_cells: _cells}
