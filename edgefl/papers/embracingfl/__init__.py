"""EmbracingFL: output-side submodels of devices that cannot hold the model (embracingfl.md)."""

from __future__ import annotations

from edgefl.papers.embracingfl import bn, counts, device, heterogeneity, scaling, similarity, text, theory
from edgefl.papers.entry import Entry

ENTRIES: tuple[Entry, ...] = tuple(
    module.ENTRY for module in (heterogeneity, scaling, bn, counts, similarity, theory, text, device)
)
