"""FIARSE: submodels by the importance of parameters (fiarse.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry

ENTRIES: tuple[Entry, ...] = ()
