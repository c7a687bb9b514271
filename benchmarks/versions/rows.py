"""Time until the model is good enough, in simulated seconds and over a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.faults.federation import broker_kind, events_of, lab_of
from edgefl.config import Federation, parse
from edgefl.setup.tiers import completed
from edgefl.simulator.results import RoundRow

Where = Literal["simulator", "mqtt"]
Simulate = Callable[[Federation, Path], Iterable[RoundRow]]
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


class VersionReport(msgspec.Struct, frozen=True):
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
    began, versions = time.monotonic(), list[VersionReport]()
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


def _simulated(rows: Iterable[RoundRow]) -> Iterator[VersionReport]:
    at = 0.0
    for row in rows:
        at += row.simulated_s
        yield VersionReport(at, row.accuracy or 0.0, row.reports, row.staleness)


def _real(federation: Federation, folder: Path) -> Iterator[VersionReport]:
    """Each version as its evaluation is told. A slow device makes steps in a tenth of the time."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "slow.toml"
    policy.write_text(
        f"duty = {0.1 / SLOWER}\n"
    )  # beside its steps a device has things to do that take no longer
    slow = {f"slow-{number}": policy for number in range(federation.tiers["slow"].count)}
    began = 0.0
    for event in events_of(lab_of(federation, folder, slow), _PATIENCE_S):
        if event.get("event") == "roundopened":
            began = began or time.monotonic()
        elif event.get("event") == "roundclosed":
            accuracy, late = event["accuracy"] or 0.0, event["staleness"]
            yield VersionReport(time.monotonic() - began, accuracy, event["reports"], late)


Mode = Literal["synchronous", "over-selected", "buffered"]
"""``synchronous``: a round waits for all that it selected; ``over-selected``: it selects half as many more and ends without
the last ones; ``buffered``: versions wait for nobody."""

MODES: tuple[Mode, ...] = ("synchronous", "over-selected", "buffered")
SLOWER = 10
"""Times that a slow device takes longer."""


def simulated(mode: Mode, *, devices: int, seed: int, rounds: int) -> Federation:
    """A third of ``devices`` is slow; a third of them is at work at a time. Local steps take 20 ms, and sending a while."""
    at_work = max(3, devices // 3)
    own: dict[Mode, dict[str, Any]] = {
        "synchronous": {"fraction": at_work / devices},
        "over-selected": {"fraction": at_work / devices, "over_selection": 1.5},
        "buffered": {"mode": "buffered", "concurrency": at_work, "buffer": max(1, at_work // 3)},
    }
    tables = _tables(seed, rounds, devices, own[mode], steps=10)
    speed = {"step_ms": 20, "up_mbit": 2, "down_mbit": 8, "spread": 0.2}
    slow = {"step_ms": 20 * SLOWER, "up_mbit": 2 / SLOWER, "down_mbit": 8 / SLOWER}
    tables["simulation"] = {**speed, "tiers": {"slow": slow}}
    tables["limits"] = {"round_deadline_s": 600.0}
    return completed(parse(tables, source="the benchmark"))


def real(mode: Mode, *, devices: int, seed: int, rounds: int, broker: str) -> Federation:
    """The same as processes: all devices are at work, except that an over-selected round ends with two thirds of them."""
    own: dict[Mode, dict[str, Any]] = {
        "synchronous": {},
        "over-selected": {"fraction": 2 / 3, "over_selection": 1.5},
        "buffered": {"mode": "buffered", "buffer": max(1, devices // 3), "keep_updates": True},
    }
    tables = _tables(seed, rounds, devices, {"min_devices": devices, **own[mode]}, steps=100)
    tables["broker"] = {"kind": broker_kind(broker)}
    tables["limits"] = {"round_deadline_s": 300.0, "ready_timeout_s": 300.0, "checkpoint_steps": 1000}
    return completed(parse(tables, source="the benchmark"))


def _tables(seed: int, rounds: int, devices: int, of_round: dict[str, Any], *, steps: int) -> dict[str, Any]:
    slow = devices // 3
    return {
        "federation": {"name": "versions", "rounds": rounds, "seed": seed},
        "model": {"name": "mlp", "options": {"hidden": [32]}},
        "algorithm": {"batch": 8, "steps": steps, "lr": 0.05},
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.2},
        "round": of_round,
        "tiers": {"quick": {"count": devices - slow}, "slow": {"count": slow}},
    }
