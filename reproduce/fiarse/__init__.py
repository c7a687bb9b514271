from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fiarse.federations import PILOT
from reproduce.fiarse.figures import FIGURES
from reproduce.fiarse.tables import TABLES

ENTRIES: tuple[Entry, ...] = (PILOT, *TABLES, *FIGURES)
