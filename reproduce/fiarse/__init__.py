from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fiarse.figures import FIGURES
from reproduce.fiarse.pilot import ENTRY
from reproduce.fiarse.tables import TABLES

ENTRIES: tuple[Entry, ...] = (ENTRY, *TABLES, *FIGURES)
