"""One file per operator family: rules that rewrite training ops into core ops ONNX can express.

A rule takes what the op takes and returns what the op returns, in ops of ``torch.ops.aten``; its docstring
holds the formula. Ops without a rule here follow PyTorch's own decomposition to the core ATen set.
"""

from __future__ import annotations

import functools

import torch

from edgefl_export.decompositions import (
    activation,
    arithmetic,
    convolution,
    indexing,
    layout,
    normalization,
    pooling,
    resize,
)
from edgefl_export.operators import Rules

_FAMILIES = (activation, arithmetic, convolution, indexing, layout, normalization, pooling, resize)

RULES: Rules = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}

# torch takes it apart by itself where there are no values, into writes.
_MISH = torch.ops.aten.mish_backward.default


@functools.cache
def first_table() -> Rules:
    """Return the rules (replacement functions by op) of the first pass of tracing.

    They are for ops whose schema hides a write to an argument, and for one op that would reach the second pass
    decomposed.
    """
    return {_MISH: _pytorch_rules()[_MISH], **normalization.HIDDEN_MUTATIONS}


def core_table() -> Rules:
    """Return the rules (replacement functions by op) of the second pass of tracing: ours, and PyTorch's core
    decompositions for all other ops.
    """
    return {**_pytorch_rules(), **RULES}


@functools.cache
def _pytorch_rules() -> Rules:
    """Return PyTorch's core decompositions. They are cached, because collecting them takes longer than tracing a layer."""
    return dict(torch.export.default_decompositions())
