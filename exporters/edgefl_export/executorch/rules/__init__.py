"""Rules that rewrite training ops into ops that XNNPACK, ExecuTorch's CPU backend, runs well.

They take precedence over those for ONNX (:mod:`edgefl_export.decompositions`), which apply to all ops without one here.
"""

from __future__ import annotations

import torch

from edgefl_export.decompositions import core_table
from edgefl_export.executorch.rules import arithmetic, normalization, pooling, positions, recurrent
from edgefl_export.operators import Rules

_aten = torch.ops.aten
# Products: XNNPACK takes a right factor that is transposed as it is.
_AS_IS = frozenset({_aten.mm.default, _aten.addmm.default})

_FAMILIES = (arithmetic, normalization, pooling, positions, recurrent)

RULES: Rules = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}


def table() -> Rules:
    """Return the rules for ExecuTorch by op: the table of the second pass
    (:func:`edgefl_export.capture.trace.decompose`).
    """
    core = {op: rule for op, rule in core_table().items() if op not in _AS_IS}
    return {**core, **RULES}
