"""Resizing by products of matrices: ExecuTorch has kernels for few of its modes and none for the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from exporters.decompositions.resize import cubic_product, linear_product

_aten = torch.ops.aten

RULES: dict[OpOverload, Callable[..., object]] = {
    _aten.upsample_linear1d.default: linear_product,
    _aten.upsample_bilinear2d.default: linear_product,
    _aten.upsample_trilinear3d.default: linear_product,
    _aten.upsample_bicubic2d.default: cubic_product,
}
