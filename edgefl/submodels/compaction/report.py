"""What compaction took away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Output channels of a kernel: how many there were, and how many are left. 0: the whole layer is gone."""

    before: int
    after: int

    @property
    def dead(self) -> int:
        return self.before - self.after


@dataclass(frozen=True)
class CompactionReport:
    """The network before and after. ``gamma`` is the share of the masked tensors' entries that the mask keeps.

    ``parameters`` and ``macs`` (of one sample's forward pass) count what a dense runtime stores and executes, zeros
    included; ``nonzero`` how many parameters the mask left.
    """

    gamma: float
    layers: Mapping[str, Layer]
    parameters_before: int
    parameters_after: int
    nonzero: int
    macs_before: int
    macs_after: int

    @property
    def dead_channels(self) -> int:
        return sum(layer.dead for layer in self.layers.values())

    @property
    def dead_share(self) -> float:
        """Of all output channels."""
        return self.dead_channels / max(1, sum(layer.before for layer in self.layers.values()))
