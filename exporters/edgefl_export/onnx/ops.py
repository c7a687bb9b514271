"""ONNX forms of core ops for which torch.onnx has none, a wrong one, or a long-winded one.

Shapes are static, so a view is one Reshape and a slice one Slice with constant arguments. Each function takes the
arguments of its aten op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from edgefl_export.decompositions import recurrent
from edgefl_export.decompositions.convolution import per_axis
from edgefl_export.decompositions.pooling import end_padding
from edgefl_export.operators import AFTER, POSITIVE, aten_ops

OPSET = 18

_aten = torch.ops.aten
_END = 2**62
_SHORT = 4
_SHORT_BLOCK = 16
_STEEPEST = torch.finfo(torch.float32).max
Value = Any  # a tensor of the graph under construction


def _ints(values: Sequence[int]) -> Value:
    attribute: Any = ir.AttrInt64s("value_ints", list(values))  # typed, as the list may be empty
    return op.Constant(value_ints=attribute)


def _scalar(like: Value, value: float) -> Value:
    """Return a number in the dtype of ``like``."""
    number: Any = ir.tensor(value, dtype=like.dtype)
    return op.Constant(value=number)


def _pads(x: Value, padding: Sequence[int]) -> list[int]:
    """Return padding in ONNX's order (all begins, then all ends); aten lists pairs from the last axis on."""
    rest = [0] * (len(x.shape) - len(padding) // 2)
    return [*rest, *padding[-2::-2], *rest, *padding[::-2]]


def view(x: Value, size: Sequence[int]) -> Value:
    return op.Reshape(x, _ints(size))


def expand(x: Value, size: Sequence[int], implicit: bool = False) -> Value:
    # ONNX broadcasts both ways: 1 keeps a size as aten's -1 does.
    return op.Expand(x, _ints([1 if length == -1 else length for length in size]))


def slice_(x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    return op.Slice(
        x, _ints([start or 0]), _ints([_END if end is None else end]), _ints([dim]), _ints([step])
    )


def select(x: Value, dim: int, index: int) -> Value:
    """Return entry ``index`` of axis ``dim``, without that axis.

    Selects from a short last axis share one Split, because onnxruntime gathers there entry by entry (1.5 ms for one of two
    of 1024x14x14, and 0.14).
    """
    rank, count = len(x.shape), x.shape[dim]
    axis, place = dim % rank, index % count
    if axis < rank - 1 or not 1 < count <= _SHORT:
        entry: Any = op.Constant(value_int=place)
        return op.Gather(x, entry, axis=axis)
    parts: Any = op.Split(x, axis=axis, num_outputs=count)
    return op.Squeeze(parts[place], _ints([axis]))


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


def batch_norm(
    x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, Value, Value]:
    """Return (y, batch mean, 1 / sqrt(batch variance + eps)) by BatchNormalization in training mode.

    With momentum 0 the running statistics of the node are those of the batch. onnxruntime overwrites the statistics that go
    in, so they must be arrays without other readers. Some values of x serve, times the weight to distinguish two norms of
    one x; their values are not used.
    """
    rank = len(x.shape)
    spatial = [0, *range(2, rank)]
    mine = op.Reshape(
        op.Slice(x, _ints([0] * (rank - 1)), _ints([1] * (rank - 1)), _ints(spatial)), _ints([-1])
    )
    mine = op.Abs(mine) if weight is None else op.Mul(mine, weight)
    scale = op.Expand(_scalar(x, 1.0), _ints([x.shape[1]])) if weight is None else weight
    shift = op.Expand(_scalar(x, 0.0), _ints([x.shape[1]])) if bias is None else bias
    out, mean, variance = op.BatchNormalization(
        x, scale, shift, mine, op.Neg(mine), epsilon=eps, momentum=0.0, training_mode=1
    )
    return out, mean, op.Reciprocal(op.Sqrt(op.Add(variance, _scalar(x, eps))))


def frozen_batch_norm(
    x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, momentum: float, eps: float
) -> tuple[Value, Value, Value]:
    """Return (y, unused, unused) by BatchNormalization in inference mode; aten leaves the two saved statistics empty."""
    scale = op.Expand(_scalar(x, 1.0), _ints([x.shape[1]])) if weight is None else weight
    shift = op.Expand(_scalar(x, 0.0), _ints([x.shape[1]])) if bias is None else bias
    out = op.BatchNormalization(x, scale, shift, mean, var, epsilon=eps)
    return out, op.Identity(mean), op.Identity(var)


def max_pool2d(
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    """Return MaxPool and its positions, converted: ONNX counts them through the whole tensor, aten within the plane.

    ceil mode is written as padding to aten's size, because some runtimes let a window begin behind the input in that mode.
    """
    kernel, padding, dilation = per_axis(kernel, 2), per_axis(padding, 2), per_axis(dilation, 2)
    stride = per_axis(stride, 2) if stride else kernel
    *planes, height, width = x.shape
    count, area = math.prod(planes), height * width
    axes = zip((height, width), kernel, stride, padding, dilation, strict=True)
    out, place = op.MaxPool(
        op.Reshape(x, _ints([1, count, height, width])) if len(planes) == 1 else x,
        kernel_shape=kernel,
        strides=stride,
        pads=[*padding, *(end_padding(*axis, ceil_mode) for axis in axes)],
        dilations=dilation,
    )
    if len(planes) == 1:
        out, place = op.Squeeze(out, _ints([0])), op.Squeeze(place, _ints([0]))
    bounds: list[Value] = [op.Constant(value_int=number) for number in (0, count * area, area)]
    starts: Value = op.Range(*bounds)
    return out, op.Sub(place, op.Reshape(starts, _ints([*planes, 1, 1])))


def gelu(x: Value, approximate: str = "none") -> Value:
    """Return x Phi(x) with ops in the order that onnxruntime fuses to one pass, or the approximation by tanh."""
    if approximate == "tanh":
        cube = op.Mul(op.Mul(op.Mul(x, x), x), _scalar(x, 0.044715))
        bent = op.Tanh(op.Mul(op.Add(x, cube), _scalar(x, math.sqrt(2 / math.pi))))
    else:
        bent = op.Erf(op.Div(x, _scalar(x, math.sqrt(2))))
    return op.Mul(op.Mul(x, op.Add(bent, _scalar(x, 1.0))), _scalar(x, 0.5))


def refused(*arguments: Value, **options: Any) -> Value:
    """Raise the error for an op that no rule rewrote and that torch.onnx would translate wrongly."""
    raise NotImplementedError("its form in torch.onnx is known to be wrong")


def after(x: Value, trigger: Value) -> Value:
    """Return x reshaped to its own shape plus 0 times an entry of ``trigger``: a dependence without a copy."""
    first = op.Slice(op.Reshape(trigger, _ints([-1])), _ints([0]), _ints([1]))
    nothing = op.Mul(op.Cast(op.IsNaN(first), to=ir.DataType.INT64), _ints([0]))
    return op.Reshape(x, op.Add(_ints(list(x.shape)), nothing))


def argmax(x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Return the first position of the largest number along ``dim``, or among all entries if ``dim`` is None.

    A long last axis takes two steps: first the block with the largest maximum, then the position in it. onnxruntime
    compares number by number there (12 ms for 1120 rows of 5000).
    """
    rank = len(x.shape)
    if dim is None or not rank:
        place = op.ArgMax(op.Reshape(x, _ints([-1])), axis=0, keepdims=0)
        return op.Reshape(place, _ints([1] * rank)) if keepdim else place
    *rows, count = x.shape
    width = _block(count) if dim % rank == rank - 1 and x.dtype == ir.DataType.FLOAT else 0
    if not width:
        return op.ArgMax(x, axis=dim % rank, keepdims=int(keepdim))
    blocks, lines = count // width, math.prod(rows)
    largest = op.ReduceMax(op.Reshape(x, _ints([lines, blocks, width])), _ints([2]), keepdims=0)
    block = op.ArgMax(largest, axis=1, keepdims=0)
    bounds: list[Value] = [op.Constant(value_int=number) for number in (0, lines * blocks, blocks)]
    within = op.Gather(
        op.Reshape(x, _ints([lines * blocks, width])), op.Add(op.Range(*bounds), block), axis=0
    )
    place = op.Add(op.Mul(block, _ints([width])), op.ArgMax(within, axis=1, keepdims=0))
    return op.Reshape(place, _ints([*rows, 1] if keepdim else rows))


def _block(count: int) -> int:
    """Return the divisor of ``count`` nearest to its square root, or 0 if none is near."""
    near = [width for width in range(_SHORT_BLOCK, count // _SHORT_BLOCK + 1) if count % width == 0]
    return min(near, key=lambda width: abs(math.log(width * width / count)), default=0)


def rsub(x: Value, other: float, alpha: float = 1) -> Value:
    return op.Sub(_scalar(x, other), x if alpha == 1 else op.Mul(x, _scalar(x, alpha)))


def positive(x: Value) -> Value:
    """Return 1 for x > 0, else 0, as a ramp from 0 to 1 that reaches 1 at 3e-39, below the normal numbers of float32."""
    return op.HardSigmoid(x, alpha=_STEEPEST, beta=0.0)


def reflection_pad(x: Value, padding: Sequence[int]) -> Value:
    return op.Pad(x, _ints(_pads(x, padding)), mode="reflect")


def replication_pad(x: Value, padding: Sequence[int]) -> Value:
    return op.Pad(x, _ints(_pads(x, padding)), mode="edge")


def prod(x: Value, dims: Sequence[int] | None = None, *, output_dtype: int = 0) -> Value:
    return op.ReduceProd(x, _ints(range(len(x.shape)) if dims is None else dims), keepdims=0)


def divide(x: Value, y: Value, rounding_mode: str | None = None) -> Value:
    """Divide and round towards zero by ONNX's Div of integers; torch.onnx would compute in float32."""
    quotient = op.Div(x, y)
    return _rounded_to_zero(quotient) if x.dtype.is_floating_point() else quotient


def _rounded_to_zero(x: Value) -> Value:
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


def log1p(x: Value) -> Value:
    """Return log(1 + x), accurate for small x: log(u) x / (u - 1) with u = 1 + x cancels the rounding of u."""
    one = _scalar(x, 1.0)
    shifted = op.Add(x, one)
    step = op.Min(op.Sub(shifted, one), _scalar(x, _STEEPEST))  # no quotient of two infinities
    return op.Where(op.Equal(step, _scalar(x, 0.0)), x, op.Mul(op.Log(shifted), op.Div(x, step)))


def expm1(x: Value) -> Value:
    """Return exp(x) - 1, accurate for small x: tanh(x / 2) (exp(x) + 1)."""
    return op.Mul(op.Tanh(op.Mul(x, _scalar(x, 0.5))), op.Add(op.Exp(x), _scalar(x, 1.0)))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(aten_ops("view _unsafe_view reshape"), view),
    _aten.expand.default: expand,
    _aten.slice.Tensor: slice_,
    _aten.select.int: select,
    _aten.unsqueeze.default: unsqueeze,
    _aten.permute.default: permute,
    _aten.flip.default: flip,
    _aten.bmm.default: bmm,
    _aten.gelu.default: gelu,
    _aten.max_pool2d_with_indices.default: max_pool2d,
    AFTER: after,
    POSITIVE: positive,
    _aten.argmax.default: argmax,
    _aten.rsub.Scalar: rsub,
    _aten.div.Tensor_mode: divide,
    _aten.log1p.default: log1p,
    _aten.expm1.default: expm1,
    **dict.fromkeys(aten_ops("as_strided as_strided_scatter special_log_ndtr"), refused),
    **dict.fromkeys(aten_ops("reflection_pad1d reflection_pad2d reflection_pad3d"), reflection_pad),
    **dict.fromkeys(aten_ops("replication_pad1d replication_pad2d replication_pad3d"), replication_pad),
    torch.ops.prims.prod.default: prod,
    _aten._native_batch_norm_legit.no_stats: batch_norm,
    _aten._native_batch_norm_legit_no_training.default: frozen_batch_norm,
    **recurrent.TRANSLATIONS,
}
