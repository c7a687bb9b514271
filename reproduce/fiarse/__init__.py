"""FIARSE: submodels by the importance of parameters (fiarse.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fiarse import ablation, exploration, sizes, text

ENTRIES: tuple[Entry, ...] = (
    *(sizes.ENTRY, sizes.CIFAR10_ENTRY, exploration.ENTRY, ablation.ENTRY),
    *(ablation.PARTICIPATION_ENTRY, text.ENTRY),
)
