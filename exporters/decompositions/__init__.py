"""One file per operator family: rules that rewrite training ops into core ops ONNX can express.

A rule takes what the op takes and returns what the op returns, in ops of ``torch.ops.aten``; its docstring
holds the formula. Ops without a rule here follow PyTorch's own decomposition to the core ATen set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from exporters.decompositions import (
    activation,
    convolution,
    indexing,
    layout,
    linear,
    loss,
    normalization,
    padding,
    pooling,
    reduction,
    resize,
    strided,
    views,
)

RULES: dict[OpOverload, Callable[..., object]] = {
    **activation.RULES,
    **convolution.RULES,
    **indexing.RULES,
    **layout.RULES,
    **linear.RULES,
    **loss.RULES,
    **normalization.RULES,
    **padding.RULES,
    **pooling.RULES,
    **reduction.RULES,
    **resize.RULES,
    **strided.RULES,
    **views.RULES,
}

# Ops whose schema hides that they write to an argument: rewritten first, or the write is lost.
HIDDEN_MUTATIONS: dict[OpOverload, Callable[..., object]] = normalization.HIDDEN_MUTATIONS


def core_table() -> dict[OpOverload, Callable[..., object]]:
    """The table of the second pass: PyTorch's core decompositions, ours in front."""
    return {**_of_pytorch(), **RULES}


@functools.cache
def _of_pytorch() -> dict[OpOverload, Callable[..., object]]:
    """Collected once, which takes longer than to trace a layer; ops registered later decompose by themselves."""
    return dict(torch.export.default_decompositions())
