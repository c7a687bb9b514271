"""Submodels: the entries of the global model that a tier holds.

Output-side suffixes, width slices, important entries, exits.

``edgefl.submodels.Width(gamma=0.5)`` names a submodel type with its options. A model of your own is split into units by
:func:`split`, or is a :class:`ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.contract.tensors import TensorSpec
    from edgefl.models.spec import ModelSpec
    from edgefl.models.split import split
    from edgefl.submodels.catalog import EarlyExit, Importance, ImportanceStructured, OutputSide, Width

__all__ = [
    "EarlyExit",
    "Importance",
    "ImportanceStructured",
    "ModelSpec",
    "OutputSide",
    "TensorSpec",
    "Width",
    "split",
]
__getattr__ = lazily_from(
    __name__,
    __all__,
    ("edgefl.contract.tensors", "edgefl.models.spec", "edgefl.models.split", "edgefl.submodels.catalog"),
)
