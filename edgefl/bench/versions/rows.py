"""Time until the model is good enough, in simulated seconds and over a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.bench.faults.federation import lab_of
from edgefl.bench.versions.federations import SLOWER, Mode, real, simulated
from edgefl.config import Federation
from edgefl.lab.lab import Said
from edgefl.simulator.row import Row

Where = Literal["simulator", "mqtt"]
Simulate = Callable[[Federation, Path], Iterable[Row]]
_PATIENCE_S = 600.0


class VersionsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run until its accuracy was ``target``, or over. ``seconds``: simulated ones, or in ``mqtt`` those of a clock, from
    the first round's opening; None where it never came so far. ``versions`` of the model and ``updates`` in them until then;
    ``staleness``: versions that an update came late, the mean; ``accuracy``: the last one; ``spent_s``: what measuring took.
    """

    mode: Mode
    where: Where
    seed: int
    devices: int
    slow: int
    target: float
    seconds: float | None
    versions: int
    updates: int
    staleness: float
    accuracy: float
    spent_s: float


class Told(msgspec.Struct, frozen=True):
    """A version of the model: when it was there, its accuracy, how many updates it had, and how late."""

    at: float
    accuracy: float
    updates: int
    staleness: float


def measure(
    mode: Mode,
    where: Where,
    *,
    devices: int,
    seed: int,
    target: float,
    folder: Path,
    simulate: Simulate,
    broker: str = "auto",
    rounds: int = 100,
    tell: Callable[[str], None] = lambda _: None,
) -> VersionsRow:
    """One run in ``folder``; ``simulate`` gives the rows of one in simulated time. EdgeflError if it does not get on."""
    began, versions = time.monotonic(), list[Told]()
    if where == "simulator":
        told = _simulated(simulate(simulated(mode, devices=devices, seed=seed, rounds=rounds), folder))
    else:
        told = _real(real(mode, devices=devices, seed=seed, rounds=rounds, broker=broker), folder)
    for each in told:
        versions.append(each)
        tell(f"{mode}, {where}, seed {seed}: version {len(versions)}, accuracy {each.accuracy:.1%}")
        if each.accuracy >= target:
            break
    last, updates = versions[-1], sum(each.updates for each in versions)
    late = sum(each.staleness * each.updates for each in versions)
    return VersionsRow(
        mode=mode,
        where=where,
        seed=seed,
        devices=devices,
        slow=devices // 3,
        target=target,
        seconds=round(last.at, 2) if last.accuracy >= target else None,
        versions=len(versions),
        updates=updates,
        staleness=round(late / max(1, updates), 2),
        accuracy=round(last.accuracy, 4),
        spent_s=round(time.monotonic() - began, 1),
    )


def _simulated(rows: Iterable[Row]) -> Iterator[Told]:
    at = 0.0
    for row in rows:
        at += row.simulated_s
        yield Told(at, row.accuracy or 0.0, row.reports, row.staleness)


def _real(federation: Federation, folder: Path) -> Iterator[Told]:
    """Each version as its evaluation is told. A slow device makes steps in a tenth of the time."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "slow.toml"
    policy.write_text(
        f"duty = {0.1 / SLOWER}\n"
    )  # beside its steps a device has things to do that take no longer
    slow = {f"slow-{number}": policy for number in range(federation.tiers["slow"].count)}
    lab = lab_of(federation, folder, slow)
    began = 0.0
    try:
        lab.start()
        for news in lab.events(patience_s=_PATIENCE_S):
            event = news.event if isinstance(news, Said) else {}
            if event.get("event") == "roundopened":
                began = began or time.monotonic()
            elif event.get("event") == "roundclosed":
                accuracy, late = event["accuracy"] or 0.0, event["staleness"]
                yield Told(time.monotonic() - began, accuracy, event["reports"], late)
    finally:
        lab.stop()
