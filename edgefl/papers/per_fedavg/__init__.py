"""Per-FedAvg: models that one step adapts to a user (per_fedavg.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry
from edgefl.papers.per_fedavg import heterogeneity, local_steps, regime, table1, theory

ENTRIES: tuple[Entry, ...] = (
    table1.ENTRY,
    local_steps.ENTRY,
    regime.ENTRY,
    theory.ENTRY,
    heterogeneity.ENTRY,
)
