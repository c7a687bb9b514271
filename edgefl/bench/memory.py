"""Peak memory of a device agent in training, over the same agent idle and connected, per tier."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from edgefl.bench.machine import quiet_environment
from edgefl.config import parse
from edgefl.lab.data import open_data, partition
from edgefl.lab.lab import Lab, Said, completed

SAMPLES_PER_DEVICE = 390
"""The paper's mean client size (spec, section 3.5): decides the size of the record."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of resident memory in the agent's own process; medians over repetitions. Times in milliseconds."""

    engine: str
    model: str
    batch: int
    tier: str
    peak_over_idle_bytes: int
    over_strong: float
    idle_bytes: int
    peak_bytes: int
    step_ms: float
    forward_ms: float
    down_bytes: int
    up_bytes: int


def measure(*, model: str = "resnet20", batch: int = 32, steps: int = 10, repeat: int = 3) -> list[MemoryRow]:
    """One federation per repetition with one fresh agent per tier; each agent runs one whole round."""
    runs = [_one_round(model, batch, steps) for _ in range(repeat)]
    tiers = list(runs[0])
    over = {
        tier: int(statistics.median(run[tier]["peak_bytes"] - run[tier]["idle_bytes"] for run in runs))
        for tier in tiers
    }
    strongest = max(over.values())
    return [
        _row(model, batch, tier, [run[tier] for run in runs], over[tier], over[tier] / strongest)
        for tier in tiers
    ]


def _row(model: str, batch: int, tier: str, seen: list[dict[str, Any]], over: int, share: float) -> MemoryRow:
    def median(key: str) -> float:
        return statistics.median(item[key] for item in seen)

    return MemoryRow(
        engine="onnxruntime",
        model=model,
        batch=batch,
        tier=tier,
        peak_over_idle_bytes=over,
        over_strong=round(share, 4),
        idle_bytes=int(median("idle_bytes")),
        peak_bytes=int(median("peak_bytes")),
        step_ms=round(median("step_ms"), 2),
        forward_ms=round(median("forward_ms"), 1),
        down_bytes=int(median("down_bytes")),
        up_bytes=int(median("up_bytes")),
    )


def _one_round(model: str, batch: int, steps: int) -> dict[str, dict[str, Any]]:
    """What each tier's agent reported of its first round."""
    tables: dict[str, Any] = {
        "federation": {"name": "bench-memory", "rounds": 1},
        "model": {"name": model},
        "program": {"steps": steps, "batch": batch},
        "data": {"name": "random", "partition": "iid"},
        "round": {"evaluate_every": 0},
        "broker": {"kind": "amqtt"},
    }
    federation = completed(parse(tables, source="the benchmark"), per_tier=1)
    devices = sum(table.count for table in federation.tiers.values())
    data = federation.data.model_copy(update={"train_samples": SAMPLES_PER_DEVICE * devices})
    federation = federation.model_copy(update={"data": data})
    dataset = open_data(federation)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        lab = Lab(federation, Path(folder), environment=quiet_environment())
        lab.prepare(dataset, partition(federation, dataset, devices))
        lab.start()
        try:
            events = [item.event for item in lab.events() if isinstance(item, Said)]
        finally:
            lab.supervisor.stop()
    order = list(federation.tiers)
    reports = [event for event in events if event.get("event") == "deviceseen" and event.get("idle_bytes")]
    return {event["tier"]: event for event in sorted(reports, key=lambda event: order.index(event["tier"]))}
