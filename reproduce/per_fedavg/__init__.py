"""Per-FedAvg: models that one step adapts to a user (per_fedavg.md)."""

from __future__ import annotations

from reproduce.entry import Entry
from reproduce.per_fedavg import heterogeneity, table1, theory

ENTRIES: tuple[Entry, ...] = (
    *(table1.ENTRY, table1.LOCAL_STEPS_ENTRY, table1.REGIME_ENTRY),
    *(theory.ENTRY, heterogeneity.ENTRY),
)
