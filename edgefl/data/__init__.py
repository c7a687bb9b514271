"""Datasets, their loaders and the partitioners that spread them over clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_modules import lazily

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset, OtherInput

_PLACES: dict[str, tuple[str, ...]] = {
    "edgefl.data.dataset": (
        "Dataset",
        "OtherInput",
    ),
}
__all__ = ["Dataset", "OtherInput"]
__getattr__ = lazily(__name__, _PLACES)
