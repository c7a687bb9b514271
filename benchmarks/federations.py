"""Federations of processes on this machine that benchmarks and tests start."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import quiet_environment
from edgefl.config import Federation, parse
from edgefl.lab.lab import Lab, ServerEvent
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed

DEVICES = 3
ROUNDS = 3
_MOSQUITTO = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"


def broker_kind(wanted: str) -> str:
    """Return the kind of broker: for ``auto`` Mosquitto if it is installed, else the embedded one."""
    if wanted != "auto":
        return wanted
    installed = shutil.which("mosquitto") or shutil.which("mosquitto", path=_MOSQUITTO)
    return "mosquitto" if installed else "amqtt"


def small_federation(
    *,
    broker: str,
    rounds: int = ROUNDS,
    devices: int = DEVICES,
    limits: dict[str, Any] | None = None,
) -> Federation:
    """Return a federation with deterministic weights: every device takes part in every round."""
    tables: dict[str, Any] = {
        "federation": {"name": "faults", "rounds": rounds, "seed": 1},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"batch": 8, "steps": 120},
        "data": {"name": "digits", "train_samples": 30 * devices, "test_samples": 50},
        "round": {"min_devices": devices},
        "tiers": {"all": {"cut": 0, "count": devices, "devices": ["all-*"]}},
        "broker": {"kind": broker_kind(broker)},
        "limits": {
            "checkpoint_steps": 10,
            "chunk_bytes": 2048,
            "ack_timeout_s": 1.0,
            "fetch_timeout_s": 1.0,
            "keepalive_s": 5,
            "reconnect_min_s": 0.05,
            "reconnect_max_s": 0.5,
            "retry_pause_s": 0.2,
            "fetch_retries": 30,
            "ready_timeout_s": 300.0,
            "offline_grace_s": 300.0,
            "round_deadline_s": 300.0,
            **(limits or {}),
        },
    }
    return completed(parse(tables, source="the benchmark"))


def lab_of(federation: Federation, folder: Path, policies: Mapping[str, Path] | None = None) -> Lab:
    """Return a lab whose folder is ready; it resumes an interrupted run there. ``policies``: files by device."""
    dataset = open_data(federation)
    lab = Lab(federation, folder, environment=quiet_environment(), policies=policies)
    folder.mkdir(parents=True, exist_ok=True)
    lab.prepare(dataset, partition(federation, dataset, len(lab.devices)))
    return lab


def events_of(lab: Lab, patience_s: float = math.inf) -> Iterator[dict[str, Any]]:
    """Start ``lab`` and yield the server's events until it is done. The lab is stopped at the end."""
    try:
        lab.start()
        for news in lab.events(patience_s):
            if isinstance(news, ServerEvent):
                yield news.event
    finally:
        lab.stop()
