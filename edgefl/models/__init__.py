"""The model zoo as unit lists, the splitting of any module into units, and layers that models may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_modules import lazily

if TYPE_CHECKING:
    from edgefl.models.layers.log_mel import LogMel

__all__ = ["LogMel"]
__getattr__ = lazily(__name__, {"edgefl.models.layers.log_mel": ("LogMel",)})
