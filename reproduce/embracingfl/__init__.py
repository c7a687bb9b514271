"""EmbracingFL's tables and figures."""

from __future__ import annotations

from reproduce.embracingfl import figures1and3, table8, tables1and10, tables2and9, tables3to7, theory
from reproduce.embracingfl.federations import PILOT
from reproduce.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    tables1and10.ENTRY, tables2and9.ENTRY_2, tables3to7.ENTRY_3, tables3to7.ENTRY_4, tables3to7.ENTRY_5, tables3to7.ENTRY_6,
    tables3to7.ENTRY_7, table8.ENTRY, tables2and9.ENTRY_9, figures1and3.ENTRY, theory.ENTRY, PILOT,
)  # fmt: skip
