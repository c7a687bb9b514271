"""Models as lists of units: the model zoo, the splitting of any module into units, and the layers of the zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.models.layers.log_mel import LogMel

__all__ = ["LogMel"]
__getattr__ = lazily_from(__name__, __all__, ("edgefl.models.layers.log_mel",))
