"""``python -m benchmarks buffered``: time until the model is good enough, with synchronous rounds and with buffered updates.

A third of the devices is slow. Times are simulated seconds, or seconds over a real broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
import typer

from benchmarks.federations import broker_kind, events_of, lab_of
from benchmarks.options import BrokerKind, Json
from benchmarks.results import bench
from edgefl.api.simulate import prepare_simulation
from edgefl.config import Federation, parse
from edgefl.setup.tiers import completed
from edgefl.simulator.results import RoundRow

Mode = Literal["synchronous", "over-selected", "buffered"]
"""``synchronous``: a round waits for all selected devices. ``over-selected``: it selects 50 % more and ends without the last
ones. ``buffered``: asynchronous rounds (FedBuff)."""
MODES: tuple[Mode, ...] = ("synchronous", "over-selected", "buffered")
SLOWER = 10
"""Factor of a slow device's times."""
_TIMEOUT_S = 600.0
Place = StrEnum("Place", ["simulator", "mqtt"])


class VersionsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run until its accuracy reached ``target``.

    Attributes:
        seconds: simulated seconds, or with ``mqtt`` real ones since the first round's opening; None if it failed.
        versions: model versions until then, with ``updates`` updates in them.
        staleness: mean staleness of an update, in versions.
        accuracy: last accuracy.
        spent_s: time of the measurement.
    """

    mode: Mode
    where: str
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


def buffered(
    where: Annotated[
        list[Place] | None, typer.Option(help="simulator or mqtt, may be repeated; default: both")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, from as many seeds")] = 3,
    target: Annotated[float, typer.Option(min=0.1, max=1, help="accuracy that is good enough")] = 0.93,
    rounds: Annotated[int, typer.Option(min=1, help="versions after which a run is given up")] = 100,
    clients: Annotated[int, typer.Option(min=9, help="of a simulation")] = 30,
    devices: Annotated[int, typer.Option(min=3, help="that are processes")] = 6,
    broker: BrokerKind = "auto",
    as_json: Json = False,
) -> None:
    """Seconds until the model is good enough, with synchronous rounds and with buffered updates; a third of the devices is
    slow.

    The simulator has 30 clients, of which 10 take ten times as long for everything and 10 work at a time; its seconds are
    simulated. Over MQTT a broker, a server and 6 devices are processes. Two of them make steps in a hundredth of the time,
    so that their rounds take about ten times as long; seconds are real ones since the opening of the first round.

    synchronous: a round waits for all selected devices. over-selected: it selects 50 % more and ends without the last ones.
    buffered: round.mode, with the same number of working devices.

    Examples:

      python -m benchmarks buffered --json

      python -m benchmarks buffered --where simulator --seeds 5 --target 0.95
    """
    cases = [
        (mode, place.value, number)
        for place in where or Place
        for number in range(seed, seed + seeds)
        for mode in MODES
    ]
    with TemporaryDirectory(prefix="edgefl-buffered-") as folder:
        bench(
            "buffered",
            f"until accuracy is {target:.0%}",
            cases,
            lambda case, say: measure(
                case[0],
                case[1],  # type: ignore[arg-type]
                devices=clients if case[1] == "simulator" else devices,
                seed=case[2],
                target=target,
                folder=Path(folder) / "-".join(map(str, case)),
                rounds=rounds,
                broker=broker,
                say=say,
            ),
            _buffered_columns,
            as_json,
        )


def _buffered_columns(row: VersionsRow) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "where": row.where,
        "seed": row.seed,
        "s": row.seconds,
        "versions": row.versions,
        "updates": row.updates,
        "staleness": row.staleness,
        "accuracy": row.accuracy,
    }


class VersionReport(msgspec.Struct, frozen=True):
    """Version of the model: its time, accuracy, number of updates and their staleness."""

    at: float
    accuracy: float
    updates: int
    staleness: float


def measure(
    mode: Mode,
    where: Literal["simulator", "mqtt"],
    *,
    devices: int,
    seed: int,
    target: float,
    folder: Path,
    broker: str = "auto",
    rounds: int = 100,
    say: Callable[[str], None] = lambda _: None,
) -> VersionsRow:
    """Run once in ``folder``. Raises EdgeflError if the run fails."""
    began, versions = time.monotonic(), list[VersionReport]()
    if where == "simulator":
        federation = simulated_federation(mode, devices=devices, seed=seed, rounds=rounds)
        reports = _simulated(prepare_simulation(federation, folder, fresh=True).rounds())
    else:
        federation = real_federation(mode, devices=devices, seed=seed, rounds=rounds, broker=broker)
        reports = _real(federation, folder)
    for each in reports:
        versions.append(each)
        say(f"{mode}, {where}, seed {seed}: version {len(versions)}, accuracy {each.accuracy:.1%}")
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
    """Yield each version when it is evaluated. A slow device makes steps in a hundredth of the time."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "slow.toml"
    # The device's other work takes as long as on a quick one, so its steps are slower than SLOWER times.
    policy.write_text(f"duty = {0.1 / SLOWER}\n")
    slow = {f"slow-{number}": policy for number in range(federation.tiers["slow"].count)}
    began = 0.0
    for event in events_of(lab_of(federation, folder, slow), _TIMEOUT_S):
        if event.get("event") == "roundopened":
            began = began or time.monotonic()
        elif event.get("event") == "roundclosed":
            accuracy, late = event["accuracy"] or 0.0, event["staleness"]
            yield VersionReport(time.monotonic() - began, accuracy, event["reports"], late)


def simulated_federation(mode: Mode, *, devices: int, seed: int, rounds: int) -> Federation:
    """Return a simulated federation: a third of ``devices`` is slow, and a third of all works at a time."""
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


def real_federation(mode: Mode, *, devices: int, seed: int, rounds: int, broker: str) -> Federation:
    """Return the same federation for processes: all devices work; an over-selected round ends with two thirds."""
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
