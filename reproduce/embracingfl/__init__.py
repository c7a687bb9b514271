"""EmbracingFL: output-side submodels of devices that cannot hold the model (embracingfl.md)."""

from __future__ import annotations

from reproduce.embracingfl import counts, device, heterogeneity, similarity, text, theory
from reproduce.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *(heterogeneity.ENTRY, heterogeneity.SCALING_ENTRY, heterogeneity.BATCH_NORM_ENTRY),
    *(module.ENTRY for module in (counts, similarity, theory, text, device)),
)
