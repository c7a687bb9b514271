"""Per-FedAvg: models that one step adapts to a user (per_fedavg.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry
from edgefl.papers.per_fedavg import heterogeneity, local_steps, regime, table1, theory

ENTRIES: tuple[Entry, ...] = tuple(
    module.ENTRY for module in (table1, local_steps, regime, theory, heterogeneity)
)
