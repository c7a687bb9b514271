"""Resizing by products of matrices: ExecuTorch has kernels for few of its modes and none for the others."""

from __future__ import annotations

import torch

from exporters.decompositions.resize import cubic_product, linear_product
from exporters.decompositions.rule import Rules

_aten = torch.ops.aten

RULES: Rules = {
    _aten.upsample_linear1d.default: linear_product,
    _aten.upsample_bilinear2d.default: linear_product,
    _aten.upsample_trilinear3d.default: linear_product,
    _aten.upsample_bicubic2d.default: cubic_product,
}
