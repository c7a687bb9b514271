"""Quotients, reductions and running products for ExecuTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl_export.decompositions import arithmetic as plain
from edgefl_export.decompositions.arithmetic import Number, operands, rules_of
from edgefl_export.executorch.rules.shifts import in_parts
from edgefl_export.operators import DECLINED, Rules

_aten = torch.ops.aten

# Quotients of whole numbers for ExecuTorch, which has an exact kernel for those that are rounded down.


def floor_divide(x: Number, y: Number) -> Tensor:
    """Compute floor(x / y). For two integer tensors of one type return NotImplemented (the op is kept)."""
    a, b = operands(x, y)
    if a.is_floating_point():
        return plain.floor_divide(a, b)
    return DECLINED if a is x and b is y else torch.floor_divide(a, b)


def divide(x: Number, y: Number, *, rounding_mode: str | None) -> Tensor:
    """Compute x / y rounded down ("floor"), or for integers towards zero ("trunc"); in other cases return
    NotImplemented (the op is kept).
    """
    a, b = operands(x, y)
    if rounding_mode == "floor":
        return floor_divide(a, b) if a.is_floating_point() else torch.floor_divide(a, b)
    if rounding_mode is None or a.is_floating_point():
        return DECLINED
    quotient = torch.floor_divide(a, b)
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).to(a.dtype)


# Reductions and running products for which ExecuTorch has no kernel.


def vector_norm(
    x: Tensor,
    order: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute (sum |x|^p)^(1/p) over ``dim``, or over all axes if ``dim`` is None; p is ``order``.

    For p = inf or -inf, compute the largest or smallest |x|. If ``dtype`` is another one than that of x, return
    NotImplemented (the op is kept).
    """
    if dtype not in (None, x.dtype):
        return DECLINED
    axes = list(range(x.dim())) if dim is None else list(dim)
    if order == 2:
        return (x * x).sum(axes, keepdim).sqrt()
    size = x.abs()
    if math.isinf(order):
        return size.amax(axes, keepdim) if order > 0 else size.amin(axes, keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(axes, keepdim)
    if order == 1:
        return size.sum(axes, keepdim)
    return size.pow(order).sum(axes, keepdim).pow(1.0 / order)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the running product y_k = x_0 ... x_k along ``dim``.

    Products over 1, 2, 4, ... entries are built from two shorter ones, so the graph grows with the logarithm of the
    length. For a single number, and if ``dtype`` is another one, return NotImplemented (the op is kept).
    """
    if dtype is None and not x.is_floating_point():
        x = x.to(torch.int64)
    if dtype not in (None, x.dtype) or not x.dim():
        return DECLINED
    length, shift = x.shape[dim], 1
    while shift < length:
        head = x.narrow(dim, 0, shift)
        x = torch.cat((head, x.narrow(dim, shift, length - shift) * x.narrow(dim, 0, length - shift)), dim)
        shift *= 2
    return x


# Activations and softmax without comparisons, which XNNPACK lacks: a step is the ceiling of what is clamped to [0, 1].

# Below this, and not at minus infinity, no logit is.
LOWEST = -1e38
# What x^2 is divided by must not be zero; beside this it is another number only where P(x) is 1/2 to the last digit.
TINY = 1e-20
# Beyond it GELU is a line, and from 1e19 on x^2 is infinite.
LARGEST = 1e9


def step(x: Tensor) -> Tensor:
    """Return 1 where x > 0, else 0. It is exact, since the ceiling of any positive number up to 1 is 1."""
    return x.clamp(0.0, 1.0).ceil()


def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Compute dL/dx = dL/dy where low < x < high, else 0.

    These selections become products later, if dL/dy is finite (:mod:`edgefl_export.select_to_multiply`).
    """
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(x <= low, zero, torch.where(x >= high, zero, grad))


def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, of_result: bool) -> Tensor:
    """Compute dL/dx = dL/dy where x > 0, slope * dL/dy elsewhere.

    ``of_result`` is True if x is the result of leaky ReLU. The gradient is equal then, because input and result have equal
    signs.
    """
    return grad * (step(x) * (1.0 - slope) + slope)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute dL/dx = dL/dy (P(x) + x p(x)), where P and p are the normal distribution and its density.

    ExecuTorch has no kernel for erf, but one for GELU, which the forward pass has computed: P(x) = GELU(x) x / x^2, 1/2
    at 0. If ``approximate`` is "tanh", compute the gradient of that approximation.
    """
    if approximate == "tanh":
        return in_parts(_tanh_gelu_backward, grad, x)
    return in_parts(_gelu_backward, grad, x)


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    x = x.clamp(-LARGEST, LARGEST)
    square = x * x
    below = (_aten.gelu(x) * x + 0.5 * TINY) / (square + TINY)
    density = (square * -0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))
    gradient: Tensor = grad * (below + x * density)
    return gradient


def _tanh_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Compute dL/dx of y = x/2 (1 + t), t = tanh(c (x + a x^3)): dL/dy (1/2 (1 + t) + x/2 (1 - t^2) c (1 + 3 a x^2))."""
    c, a = math.sqrt(2.0 / math.pi), 0.044715
    square = x * x
    t = torch.tanh(x * (square * (a * c) + c))
    return grad * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * (square * (3.0 * a * c) + c))


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the softmax along ``dim``, and 0 for minus infinity even if a whole row is masked, as torch does.

    For other types than float32 return NotImplemented (the op is kept).
    """
    if dtype not in (None, torch.float32) or x.dtype != torch.float32:
        return DECLINED
    shares: Tensor = _aten._softmax(x.clamp_min(LOWEST), dim, False)
    return shares * (x - LOWEST).clamp(0.0, 1.0)


RULES: Rules = {
    **rules_of("floor_divide", floor_divide),
    _aten.div.Tensor_mode: divide,
    _aten.div.Scalar_mode: divide,
    _aten.cumprod.default: cumprod,
    _aten.linalg_vector_norm.default: vector_norm,
    _aten._safe_softmax.default: safe_softmax,
    _aten.gelu_backward.default: gelu_backward,
    _aten.hardtanh_backward.default: hardtanh_backward,
    _aten.leaky_relu_backward.default: leaky_relu_backward,
}
