"""Convolutions of images with few channels: all kernel offsets as planes [N, KH * KW * C, H', W'], channels first.

Runs of one to three numbers are too short to be copied one by one; whole rows of a plane are not. With so few channels
the columns are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl_export.executorch.rules.dense import Moves
from edgefl_export.executorch.rules.shifts import join, taps

MOST_ROW = 16
"""Numbers per kernel row, KW * C, up to which a convolution has few channels."""
MOST_ALL = 128
"""Numbers per kernel, KH * KW * C, up to which it is."""


def covers(shape: Sequence[int]) -> bool:
    """Return True if a kernel [O, C, KH, KW] has few channels. Kernels of one position are plain products."""
    offsets = shape[2] * shape[3]
    return shape[3] * shape[1] <= MOST_ROW and offsets * shape[1] <= MOST_ALL and offsets > 1


def fits(w: Tensor) -> bool:
    return covers(w.shape)


def forward(x: Tensor, w: Tensor, moves: Moves) -> Tensor:
    """x [N, C, H, W] -> y [N, H', W', O]."""
    height, width = moves.outputs(x.permute(0, 2, 3, 1), (w.shape[2], w.shape[3]))
    planes = _planes(x, w.shape[2:], height, width, moves)
    y = torch.mm(
        planes.permute(0, 2, 1).reshape(-1, planes.shape[1]), w.permute(2, 3, 1, 0).reshape(-1, len(w))
    )
    return y.view(x.shape[0], height, width, w.shape[0])


def weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: Moves) -> Tensor:
    """dL/dy [N, O, H', W'], x [N, C, H, W] -> dL/dw [O, C, KH, KW]: a product per sample, then their sum."""
    planes = _planes(x, kernel, grad.shape[2], grad.shape[3], moves)
    last = grad.permute(0, 2, 3, 1).reshape(grad.shape[0], -1, grad.shape[1])
    gradient = torch.bmm(planes, last).sum(0)
    return gradient.view(*kernel, x.shape[1], grad.shape[1]).permute(3, 2, 0, 1)


def _planes(x: Tensor, kernel: Sequence[int], height: int, width: int, moves: Moves) -> Tensor:
    """[N, KH * KW * C, H' * W']: the input seen through each kernel offset."""
    rows = taps(x, 2, kernel[0], height, moves.stride[0], moves.padding[0], moves.dilation[0])
    planes = [
        tap
        for row in rows
        for tap in taps(row, 3, kernel[1], width, moves.stride[1], moves.padding[1], moves.dilation[1])
    ]
    return join(planes, 1).reshape(x.shape[0], -1, height * width)
