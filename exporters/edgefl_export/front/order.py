"""What is to be compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.limits import Limits
from edgefl_export.bundle.formats import Format, Onnx
from edgefl_export.front.tier import Exchange, Tier
from edgefl_export.memory.recompute import Budget


@dataclass(frozen=True)
class Order:
    """One exchange of a tier for samples like ``data``; ``model`` is what people read on the bundle.

    ``memory_budget`` bounds a training step's memory: it recomputes and pages what it takes. ``tokenizer``: the JSON
    that devices read texts by, for data whose reader is of text.
    """

    tier: Tier
    exchange: Exchange
    model: str
    data: DataSpec
    format: Format = field(default_factory=Onnx)
    chunk_bytes: int = Limits().chunk_bytes
    memory_budget: Budget | None = None
    tokenizer: bytes = b""
