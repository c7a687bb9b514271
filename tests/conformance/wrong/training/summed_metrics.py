"""Sends the sums of its metrics in place of their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_runtime.round import runner
from edgefl.wire.bundle.manifest import Manifest


def plant() -> None:
    def sums(manifest: Manifest, found: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
        return dict(found)

    runner.means = sums
