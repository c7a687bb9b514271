"""Profiles and files made by hand, and one profile that was measured."""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path

import msgspec

from edgefl.wire.bundle.archive import write_bundle
from edgefl.wire.bundle.profiles import BundleProfile, CallTimes, GraphProfile, PeakMemory, StageTimes
from edgefl_device.profile.whole import ProfileSettings, profile_bundle
from tests.device_runtime import tiny


@functools.cache
def measured(prefix: tuple[str, ...] = ("stem", "mid")) -> BundleProfile:
    """The tiny bundle's profile, measured once."""
    return profile_bundle(tiny.make_bundle(prefix), ProfileSettings(repeat=5, samples=10))


def graph(name: str, kind: str, median_ms: float, **fields: object) -> GraphProfile:
    made = GraphProfile(
        name=name,
        kind=msgspec.convert(kind, type=str),  # type: ignore[arg-type]
        artifact_bytes=2048,
        macs=3_000_000,
        load_ms=12.0,
        run=CallTimes(calls=5, median_ms=median_ms, p90_ms=median_ms + 1, min_ms=median_ms - 1),
        peak=PeakMemory(planned_bytes=8 << 20, engine_bytes=4 << 20, rss_bytes=6 << 20),
        split=StageTimes(
            forward_ms=2.0,
            backward_ms=5.0,
            update_ms=1.0,
            how="measured",
            forward_p90_ms=0.0,
            backward_p90_ms=0.0,
            update_p90_ms=0.0,
        )
        if kind == "step"
        else None,
    )
    return msgspec.structs.replace(made, **fields)


def tier_of(profile: BundleProfile, tier: str, peak: int, parameters: int) -> BundleProfile:
    return msgspec.structs.replace(profile, tier=tier, peak_bytes=peak, parameters=parameters)


def journal(folder: Path, rows: list[tuple[str, int, str, str]], *, bundle: bool = True) -> Path:
    """A run's folder whose journal holds updates: tier, round, metrics as JSON, reason for refusal ("": taken). The
    ``bundle`` is one of ``tiny.BATCH`` samples a step."""
    folder.mkdir(parents=True, exist_ok=True)
    if bundle:
        (folder / "bundles").mkdir()
        write_bundle(tiny.make_bundle(prefix=()), folder / "bundles" / "strong.efl")
    with sqlite3.connect(folder / "journal.sqlite") as db:
        db.execute("CREATE TABLE assignments (run, round, device, tier)")
        db.execute("CREATE TABLE updates (run, round, device, metrics, reason)")
        for number, (tier, round_, metrics, reason) in enumerate(rows):
            device = f"{tier}-{number}"
            db.execute("INSERT INTO assignments VALUES ('r', ?, ?, ?)", (round_, device, tier))
            db.execute("INSERT INTO updates VALUES ('r', ?, ?, ?, ?)", (round_, device, metrics, reason))
    return folder
