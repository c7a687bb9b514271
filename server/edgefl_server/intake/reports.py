"""What an update says of itself, as the journal and people get it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import Update
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl.wire.text import printable
from edgefl_server.coordinator.states import MOST_SAMPLES
from edgefl_server.events import REPORTED, DeviceSeen, UpdateAccepted

_MOST_METRICS = 64
_MOST_NAME = 64
_MOST_MS = 1e12
_MOST_BYTES = 2**53
"""That a device may say it fetched: any journal can add up a million of them."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    names = sorted(name for name, value in metrics.items() if math.isfinite(value))
    return {printable(name, _MOST_NAME): float(metrics[name]) for name in names[:_MOST_METRICS]}


def fetched(update: Update) -> PublishTraffic:
    """What the device says it downloaded, bounded by what a journal can hold."""
    counts = (update.profile.down_bytes, update.profile.down_wire_bytes)
    return PublishTraffic(*(max(0, min(count, _MOST_BYTES)) for count in counts))


def train_ms(update: Update, manifest: Manifest) -> float:
    """Milliseconds of all local steps of a round, as the device says; 0 if it says nothing that can be."""
    steps = sum(manifest.steps_with(max(0, min(update.samples, MOST_SAMPLES))))
    took = steps * update.profile.step_ms
    return took if 0 < took < _MOST_MS else 0.0


def accepted_news(update: Update, sha256: str, weight: int) -> UpdateAccepted:
    return UpdateAccepted(
        device=update.device,
        tier=update.tier,
        round=update.round,
        nonce=update.nonce,
        sha256=sha256,
        weight=weight,
    )


def report(update: Update, down: PublishTraffic, up: PublishTraffic) -> DeviceSeen:
    return DeviceSeen(
        device=update.device,
        tier=update.tier,
        round=update.round,
        stage=REPORTED,
        loss=update.metrics.get("loss", float("nan")),
        step_ms=update.profile.step_ms,
        peak_bytes=update.profile.peak_bytes,
        down_bytes=down.payload,
        up_bytes=up.payload,
        down_wire_bytes=down.wire,
        up_wire_bytes=up.wire,
        idle_bytes=update.profile.idle_bytes,
        forward_ms=update.profile.forward_ms,
        variants=_few(update.profile.variants),
        dropped=_few(update.profile.dropped),
    )


def _few(told: Mapping[str, str]) -> dict[str, str]:
    """Short words of a device, and not many."""
    return {printable(name, _MOST_NAME): printable(told[name], 200) for name in sorted(told)[:_MOST_METRICS]}
