"""EmbracingFL: output-side submodels of devices that cannot hold the model (embracingfl.md)."""

from __future__ import annotations

from edgefl.papers.embracingfl import device
from edgefl.papers.entry import Entry

ENTRIES: tuple[Entry, ...] = (device.ENTRY,)
