"""What one measured process hands back."""

from __future__ import annotations

import msgspec

from edgefl.wire.bundle.profiles import GraphProfile
from edgefl_device.profile.measure.round import RoundProfile

ROUND, GRAPH = "round", "graph:"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One graph or the round, whichever was asked for, and the engine that ran it."""

    version: str
    open_ms: float
    graph: GraphProfile | None = None
    round: RoundProfile | None = None
