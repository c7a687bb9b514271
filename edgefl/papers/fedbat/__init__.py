"""FedBAT: learned one-bit updates (fedbat.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry
from edgefl.papers.fedbat import main

ENTRIES: tuple[Entry, ...] = (main.ENTRY,)
