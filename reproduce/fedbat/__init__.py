"""FedBAT: updates that are binarized while they are trained (fedbat.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.fedbat import ablation, main, one_bit, theory

ENTRIES: tuple[Entry, ...] = tuple(module.ENTRY for module in (main, ablation, one_bit, theory))
