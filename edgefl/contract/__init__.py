"""What every room agrees on: named tensors, a program and its functions, the server's state, ranges of options."""

from edgefl.contract.program import CarryRule, Function, Phase, Program
from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select

__all__ = [
    "CarryRule",
    "Function",
    "Phase",
    "Program",
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
