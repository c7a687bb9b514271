"""Datasets, their loaders, and partitions of their samples among clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset, OtherInput

# heterogeneity compares the devices' data at a model. Its module is above this one, so that only its name is here.
__all__ = ["Dataset", "OtherInput", "heterogeneity"]
__getattr__ = lazily_from(__name__, __all__, ("edgefl.data.dataset", "edgefl.api.analysis"))
