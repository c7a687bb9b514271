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
    """The table of the first pass: of ops whose schema hides that they write to an argument, or the write is lost, and of
    one that would reach the second pass in pieces."""
    return {_MISH: _of_pytorch()[_MISH], **normalization.HIDDEN_MUTATIONS}


def core_table() -> Rules:
    """The table of the second pass: PyTorch's core decompositions, ours in front."""
    return {**_of_pytorch(), **RULES}


@functools.cache
def _of_pytorch() -> Rules:
    """Collected once, which takes longer than to trace a layer; ops registered later decompose by themselves."""
    return dict(torch.export.default_decompositions())
