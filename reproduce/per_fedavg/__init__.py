"""Per-FedAvg: a model that is good for each user after one step (per_fedavg.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.per_fedavg.table1 import APPENDIX_I, FIGURE1, TABLE1, TABLE2
from reproduce.per_fedavg.theory import THEORY

ENTRIES: tuple[Entry, ...] = (TABLE1, TABLE2, FIGURE1, APPENDIX_I, THEORY)
