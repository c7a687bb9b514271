"""ONNX forms of core ops for which torch.onnx has none, a wrong one, or a long-winded one.

Shapes are static, so a view is one Reshape and a slice one Slice with constant arguments. Each function takes the
arguments of the aten op it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import opset18 as op

OPSET = 18

_aten = torch.ops.aten
_END = 2**62
Value = Any  # a tensor of the graph under construction


def _ints(values: Sequence[int]) -> Value:
    return op.Constant(value_ints=list(values))


def view(x: Value, size: Sequence[int]) -> Value:
    return op.Reshape(x, _ints(size))


def expand(x: Value, size: Sequence[int], implicit: bool = False) -> Value:
    # ONNX broadcasts both ways: 1 keeps a size as aten's -1 does.
    return op.Expand(x, _ints([1 if length == -1 else length for length in size]))


def slice_(x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    return op.Slice(
        x, _ints([start or 0]), _ints([_END if end is None else end]), _ints([dim]), _ints([step])
    )


def unsqueeze(x: Value, dim: int) -> Value:
    return op.Unsqueeze(x, _ints([dim]))


def permute(x: Value, dims: Sequence[int]) -> Value:
    rank = len(dims)
    return op.Transpose(x, perm=[dim % rank for dim in dims])


def flip(x: Value, dims: Sequence[int]) -> Value:
    count = len(dims)
    return op.Slice(x, _ints([-1] * count), _ints([-_END] * count), _ints(dims), _ints([-1] * count))


def bmm(x: Value, y: Value) -> Value:
    return op.MatMul(x, y)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: view,
    _aten._unsafe_view.default: view,
    _aten.reshape.default: view,
    _aten.expand.default: expand,
    _aten.slice.Tensor: slice_,
    _aten.unsqueeze.default: unsqueeze,
    _aten.permute.default: permute,
    _aten.flip.default: flip,
    _aten.bmm.default: bmm,
}
