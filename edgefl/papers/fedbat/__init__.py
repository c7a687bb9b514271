"""FedBAT: learned one-bit updates (fedbat.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry

ENTRIES: tuple[Entry, ...] = ()
