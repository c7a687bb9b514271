"""Padding with a tensor's own values, in one to three dimensions: forwards stay (ONNX Pad), gradients fold back.

Each gradient goes one axis after the other: what was copied from an entry is added to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgefl_export.decompositions.rule import DECLINED, Rules
from edgefl_export.named import named

_aten = torch.ops.aten


def replication_pad_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """dL/dx[i] = sum of dL/dy[j] over all j with clamp(j - left, 0, n - 1) = i: only borders have more than one."""
    return _each_axis(grad, x, padding, _fold_border)


def reflection_pad_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """dL/dx[i] = dL/dy[left + i], plus dL/dy[left - i] for 1 <= i <= left, and as many from the mirror at the end."""
    return _each_axis(grad, x, padding, _fold_mirror)


def _each_axis(
    grad: Tensor, x: Tensor, padding: list[int], fold: Callable[[Tensor, int, int, int, int], Tensor]
) -> Tensor:
    if min(padding) < 0:
        return DECLINED
    for index in range(len(padding) // 2):
        left, right = padding[2 * index : 2 * index + 2]
        axis = grad.dim() - 1 - index
        if left or right:
            grad = fold(grad, axis, x.shape[axis], left, right)
    return grad


def _fold_border(grad: Tensor, axis: int, size: int, left: int, right: int) -> Tensor:
    if size == 1:
        return grad.sum(axis, keepdim=True)
    first = grad.narrow(axis, 0, left + 1).sum(axis, keepdim=True)
    middle = grad.narrow(axis, left + 1, size - 2)
    last = grad.narrow(axis, left + size - 1, right + 1).sum(axis, keepdim=True)
    return torch.cat([first, middle, last], axis)


def _fold_mirror(grad: Tensor, axis: int, size: int, left: int, right: int) -> Tensor:
    behind = grad.dim() - 1 - axis
    total = grad.narrow(axis, left, size)
    if left:
        mirrored = grad.narrow(axis, 0, left).flip(axis)  # of entries 1 .. left
        total = total + _aten.constant_pad_nd(mirrored, [0, 0] * behind + [1, size - 1 - left], 0.0)
    if right:
        mirrored = grad.narrow(axis, left + size, right).flip(axis)  # of entries size - 1 - right .. size - 2
        total = total + _aten.constant_pad_nd(mirrored, [0, 0] * behind + [size - 1 - right, 1], 0.0)
    return total


def _kept(x: Tensor, padding: list[int]) -> Tensor:
    """No rule: the op has an ONNX form of its own, better than PyTorch's decomposition."""
    return DECLINED


RULES: Rules = {
    **dict.fromkeys(named("reflection_pad1d reflection_pad2d reflection_pad3d"), _kept),
    **dict.fromkeys(named("replication_pad1d replication_pad2d replication_pad3d"), _kept),
    **dict.fromkeys(
        named("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"),
        reflection_pad_backward,
    ),
    **dict.fromkeys(
        named("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"),
        replication_pad_backward,
    ),
}
