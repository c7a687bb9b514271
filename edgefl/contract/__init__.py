"""What every room agrees on: named tensors, an algorithm and its functions, the server's state, ranges of options.

Names are loaded when they are first used: a server that waits for devices needs none that brings torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
    from edgefl.contract.schedule import Scalars
    from edgefl.contract.server import ServerOpt, beside, state_of
    from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select

_PLACES = {
    "algorithm": ("CarryRule", "Function", "Phase", "Algorithm"),
    "schedule": ("Scalars",),
    "server": ("ServerOpt", "beside", "state_of"),
    "tensors": ("TensorSpec", "Tensors", "prefixed", "role_of", "select"),
}
_FROM = {name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FROM[name]), name)
    return value
