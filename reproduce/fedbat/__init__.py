"""FedBAT: one bit for each parameter of an update, binarized in training (fedbat.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fedbat.federations import PILOT
from reproduce.fedbat.table1 import FIGURE2, FIGURE3, TABLE1, TABLE2, TABLE3
from reproduce.fedbat.table4 import TABLE4
from reproduce.fedbat.tables5and6 import TABLE5, TABLE6
from reproduce.fedbat.theory import THEORY

ENTRIES: tuple[Entry, ...] = (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, FIGURE2, FIGURE3, PILOT, THEORY)
