"""What a format makes of a captured function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgefl.wire.bundle.sources import Node


@dataclass(frozen=True)
class Artifact:
    """``model`` is what a device loads.

    ``planned_bytes``: memory over the idle process that one call needs, known in advance (0: unknown).
    ``in_place``: state ports whose new value may be written into the memory of the old one.
    ``nodes``: what is in it, by name, and where that comes from.
    """

    model: bytes
    planned_bytes: int = 0
    in_place: tuple[str, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
