"""FAFED (Wu, Huang, Hu, Huang 2023)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fafed import federations, figure1, table2, theorems

ENTRIES: tuple[Entry, ...] = (
    theorems.THEOREM_1, theorems.TABLE_1, table2.TABLE, *table2.FIGURES, figure1.ENTRY, federations.PILOT
)  # fmt: skip
