"""FAFED: momentum, variance reduction and one adaptive step size for all clients (fafed.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fafed import counterexample, preconditioner, speedup, table2, text

ENTRIES: tuple[Entry, ...] = tuple(
    module.ENTRY for module in (counterexample, table2, preconditioner, speedup, text)
)
