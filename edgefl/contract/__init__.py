"""Contracts between the packages: named tensors, algorithms and their functions, server state, and checks of options.

Names are loaded at first use, because a server that waits for devices does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
    from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
    from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select

__all__ = [
    "Algorithm",
    "CarryRule",
    "Function",
    "Phase",
    "Scalars",
    "ServerOpt",
    "TensorSpec",
    "Tensors",
    "beside",
    "prefixed",
    "role_of",
    "select",
    "state_of",
]
__getattr__ = lazily_from(
    __name__, __all__, ("edgefl.contract.server", "edgefl.contract.tensors", "edgefl.contract.algorithm")
)
