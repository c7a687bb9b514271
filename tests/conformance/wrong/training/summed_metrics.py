"""Sends the sums of its metrics in place of their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.wire.bundle.manifest import Manifest
from edgefl_device.round import trainer


def plant() -> None:
    def sums(manifest: Manifest, found: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
        return dict(found)

    trainer.mean_metrics = sums
