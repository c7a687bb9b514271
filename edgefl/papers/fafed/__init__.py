"""FAFED: momentum, variance reduction and one adaptive step size for all clients (fafed.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry
from edgefl.papers.fafed import counterexample

ENTRIES: tuple[Entry, ...] = (counterexample.ENTRY,)
