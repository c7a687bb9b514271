"""Per-FedAvg: models that one step adapts to a user (per_fedavg.md)."""

from __future__ import annotations

from edgefl.papers.entry import Entry

ENTRIES: tuple[Entry, ...] = ()
