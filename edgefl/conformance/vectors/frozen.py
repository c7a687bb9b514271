"""The frozen vectors of the protocol, which lie in the package: one place for tests, documents and other languages."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
GOLDEN = _DATA / "golden"
"""Messages, manifests, references, tensors, patches and frames; ``values.json`` says what those in MessagePack decode to."""
UPDATES = _DATA / "updates"
"""Coded updates, as JSON: ``codes.json`` and ``updates.json``."""
