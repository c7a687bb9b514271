"""FIARSE: submodels by the importance of parameters (fiarse.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry
from edgefl.papers.fiarse import ablation, cifar10, exploration, participation, sizes, text

ENTRIES: tuple[Entry, ...] = tuple(
    module.ENTRY for module in (sizes, cifar10, exploration, ablation, participation, text)
)
