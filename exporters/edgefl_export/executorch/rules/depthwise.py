"""Convolutions with one channel per group: a product per kernel offset, element by element, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl_export.executorch.rules.dense import Moves
from edgefl_export.executorch.rules.shifts import place, taps, total


def forward(x: Tensor, w: Tensor, moves: Moves) -> Tensor:
    """x [N, H, W, C], w [C, 1, KH, KW] -> y [N, H', W', C]."""
    tall, wide = w.shape[2:]
    size = moves.outputs(x, (tall, wide))
    scales = _scales(w)
    parts = _taken(x, (tall, wide), size, moves)
    return total([part * scale for part, scale in zip(parts, scales, strict=True)], ())


def input_gradient(grad: Tensor, w: Tensor, size: Sequence[int], moves: Moves) -> Tensor:
    """dL/dx [N, *size, C]: dL/dy times the weight of each offset, put where that offset read."""
    tall, wide = w.shape[2:]
    scales = _scales(w)
    parts = [[grad * scales[i * wide + j] for j in range(wide)] for i in range(tall)]
    return place(parts, size, moves.all_met((tall, wide)))


def weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: Moves) -> Tensor:
    """dL/dw [C, 1, KH, KW]: per offset, the sum over samples and positions of dL/dy times what it met."""
    parts = _taken(x, kernel, grad.shape[1:3], moves)
    sums = [(grad * part).sum([0, 1, 2]).view(-1, 1) for part in parts]
    return torch.cat(sums, 1).view(-1, 1, *kernel)


def _scales(w: Tensor) -> list[Tensor]:
    """The weight of each offset, [C] each."""
    rows = w.flatten(1).permute(1, 0)
    return [rows[k : k + 1].reshape(-1) for k in range(rows.shape[0])]


def _taken(x: Tensor, kernel: Sequence[int], size: Sequence[int], moves: Moves) -> list[Tensor]:
    """The input seen through each kernel offset: [N, *size, C] each."""
    rows = taps(x, 1, kernel[0], size[0], moves.stride[0], moves.padding[0], moves.dilation[0])
    return [
        part
        for row in rows
        for part in taps(row, 2, kernel[1], size[1], moves.stride[1], moves.padding[1], moves.dilation[1])
    ]
