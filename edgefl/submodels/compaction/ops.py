"""Operations with a known effect on single channels. Every output of any other operation needs all its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


def _ops(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


CONVOLUTIONS = _ops("conv1d", "conv2d", "conv3d")
KERNELS = CONVOLUTIONS | _ops("linear")
NORMS = _ops("batch_norm", "native_batch_norm")
"""Batch norms with given statistics, or with those of the batch."""

POINTWISE = _ops(
    "relu", "relu_", "relu6", "hardtanh", "leaky_relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "elu", "selu", "celu", "softplus", "mish", "exp", "neg", "abs", "square", "sqrt", "rsqrt", "clamp", "clamp_min",
    "add", "sub", "mul", "div", "add_",
)  # fmt: skip
"""Operations entry by entry, with broadcasting. NaN inputs always give NaN."""

ADDITIONS = _ops("add", "sub", "add_", "mul")
"""Operations of two tensors, one of which may be a constant that broadcasts."""

LINEAR = _ops(
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "unsqueeze", "squeeze",
    "contiguous", "clone", "alias", "detach", "mean", "sum", "cat", "slice", "select", "expand", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "constant_pad_nd", "pad",
)  # fmt: skip
"""Sums of inputs with positive factors: an output needs the inputs by which its derivative is positive."""

MAXIMA = _ops("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
"""Maxima of a channel over positions."""


def packet(node: fx.Node) -> Any:
    """Return the torch operation that ``node`` calls, without its overload. None: it calls none."""
    return getattr(node.target, "overloadpacket", None)


def is_padded(node: fx.Node) -> bool:
    """Return True if a convolution reads zeros beyond the borders."""
    padding = node.args[4] if len(node.args) > 4 else node.kwargs.get("padding", 0)
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def uses_batch(node: fx.Node) -> bool:
    """Return True if a batch norm uses the statistics of its batch."""
    return bool(node.args[5])


def groups_of(node: fx.Node) -> int:
    """Return the groups of a convolution, 1 for a linear layer."""
    if packet(node) not in CONVOLUTIONS:
        return 1
    groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    assert isinstance(groups, int)
    return groups
