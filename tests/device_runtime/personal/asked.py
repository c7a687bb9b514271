"""A device that is asked for a personal model: its samples, the round of a tier, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result

from edgefl.cli import app
from edgefl.wire.mqtt.messages import Offer, Round
from tests.analysis.personal.tiers import Tier
from tests.cli.runner import runner

CHUNK = 1024
SIGNED = "ab" * 32


def samples(path: Path, tier: Tier, count: int, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, *tier.spec.sample.shape)).astype(np.float32)
    np.savez(path, x=x, y=rng.integers(0, 3, count))
    return path


def announcement(
    tier: Tier, state: str = "closed", *, others: Sequence[str] = (), signed: bytes = b""
) -> Round:
    """Of a tier, and of ``others`` with the same bundle."""
    job = tier.job(CHUNK)
    bundles = dict.fromkeys(("tier", *others), job.bundle)
    return Round(
        run="run",
        round=3,
        state=state,  # type: ignore[arg-type]
        model_version="v3",
        offers={"onnx": Offer(bundles=bundles, signatures={"tier": signed} if signed else {})},
        units=job.units,
        hyper={"alpha": 0.25},
        base=2,
        deadline=0.0,
    )


def invoked(options: list[str], folder: Path, *more: str) -> Result:
    limits = ["--limit=fetch_timeout_s=2", "--limit=fetch_window=4"]
    arguments = [
        "device",
        "personalize",
        *options,
        *limits,
        "--store",
        str(folder / "store"),
        "--json",
        *more,
    ]
    done = runner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done


def run(options: list[str], folder: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoked(options, folder, *more).stdout)
    return found
