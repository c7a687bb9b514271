"""One run of an arm, on disk: what was run, on what, how long it took, and what it told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.machine import machine
from edgefl.api.federation import load_federation
from edgefl.api.simulate import prepare_simulation
from edgefl.errors import ConfigError, EdgeflError
from edgefl.simulator.results import RoundRow
from edgefl.system.files import write_whole
from edgefl.system.structs import filled
from reproduce.entry import Arm, ArmRun, Entry, Federated, Measurements, Scale
from reproduce.results import Results

RECORD_NAME = "record.json"
_SIMULATION = "simulation"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``settings``: of the federation, by dotted key, or of the computation. ``data``: the dataset's name. ``started``: UTC,
    ISO 8601. ``seconds``: of all rounds, those that an interrupted run had behind it included."""

    entry: str
    arm: str
    scale: Scale
    seed: int
    settings: dict[str, Any]
    data: str
    started: str
    seconds: float
    machine: dict[str, Any]
    found: Measurements


def read_record(folder: Path) -> Record | None:
    """The record of a finished run; None where there is none, or one that cannot be read."""
    try:
        return msgspec.json.decode((folder / RECORD_NAME).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def made_of(arm: Arm, seed: int) -> dict[str, Any]:
    """What decides the numbers of a run, as it is written down."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(arm.settings)))
    return plain | ({"federation.seed": seed} if isinstance(arm, Federated) else {"seed": seed})


def run_arm(
    entry: str, arm: Arm, scale: Scale, seed: int, folder: Path, progress: Callable[[str], None]
) -> Record:
    """Run ``arm``, or go on with it, and write its record. Errors name entry, arm and seed."""
    torch.set_num_threads(1)  # runs go side by side, and equal threads give equal bits
    folder.mkdir(parents=True, exist_ok=True)
    started, began = datetime.now(UTC), time.perf_counter()
    try:
        found, data, before = _found(arm, scale, seed, folder, progress)
    except EdgeflError as error:
        raise ConfigError(
            f"{entry}, {arm.name}, seed {seed}: {error.message}", entry=entry, arm=arm.name
        ) from error
    record = Record(
        entry=entry,
        arm=arm.name,
        scale=scale,
        seed=seed,
        settings=made_of(arm, seed),
        data=data,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began + before, 2),
        machine=machine(),
        found=found,
    )
    write_whole(folder / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record


def _found(
    arm: Arm, scale: Scale, seed: int, folder: Path, progress: Callable[[str], None]
) -> tuple[Measurements, str, float]:
    """What was found, the data's name, and the seconds of rounds that were run before, by a process that was stopped."""
    if not isinstance(arm, Federated):
        return arm.compute(ArmRun(seed, scale, folder, progress)), "", 0.0
    federation = load_federation(None, {**arm.settings, "federation.seed": seed})
    place = folder / _SIMULATION
    try:
        prepared = prepare_simulation(federation, place, resume=True)
    except ConfigError:
        # Another configuration, or other code: what was begun is of no use.
        prepared = prepare_simulation(federation, place, fresh=True)
    rounds = federation.federation.rounds
    run: set[int] = set()

    def watch(row: RoundRow) -> None:
        run.add(row.round)
        progress(f"round {row.round} of {rounds}")

    ended = prepared.run(watch)
    before = sum(row.seconds for row in ended.history if row.round not in run)
    return arm.measure(ended), prepared.dataset.name, before


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one arm: each figure's mean and deviation over the seeds, the runs' own values, and the paper's numbers."""

    arm: str
    settings: dict[str, Any]
    mean: dict[str, float]
    deviation: dict[str, float]
    values: dict[str, list[float]]
    paper: dict[str, float]
    seconds: float


class ClaimSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A claim, what the paper found, what was found here, and whether it held; ``doubt``: why not, likely."""

    rank: str
    text: str
    paper: str
    ours: str
    held: bool
    confidence: str
    doubt: str
    exact: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All that ``results.json`` says. ``seconds``: of all runs, one after the other."""

    entry: str
    what: str
    scale: Scale
    command: str
    seeds: list[int]
    data: list[str]
    started: str
    seconds: float
    machine: dict[str, Any]
    arms: list[ArmSummary]
    claims: list[ClaimSummary]
    note: str = ""

    @property
    def broken(self) -> list[str]:
        """Claims that have to hold at every scale, and did not."""
        return [each.text for each in self.claims if each.exact and not each.held]


def results_of(records: Sequence[Record]) -> Results:
    """Of one entry. ConfigError unless every arm was run for the same seeds."""
    seeds = sorted({record.seed for record in records})
    by_arm: dict[str, dict[int, Record]] = {}
    for record in records:
        by_arm.setdefault(record.arm, {})[record.seed] = record
    lacking = [arm for arm, runs in by_arm.items() if sorted(runs) != seeds]
    if lacking:
        raise ConfigError(
            f"not all seeds were run of {', '.join(lacking)}; run the entry again", arms=tuple(lacking)
        )
    return Results(
        seeds,
        {arm: [runs[seed].found.figures for seed in seeds] for arm, runs in by_arm.items()},
        {arm: [runs[seed].found.lines for seed in seeds] for arm, runs in by_arm.items()},
    )


def summed_up(entry: Entry, scale: Scale, records: Sequence[Record]) -> Summary:
    """``records`` of every arm and seed of ``entry`` at ``scale``."""
    results = results_of(records)
    arms = [
        _arm(entry, arm, results, [each for each in records if each.arm == arm]) for arm in results.figures
    ]
    judged = [(claim, claim.judge(results)) for claim in entry.claims]
    return Summary(
        what=entry.what,
        note=entry.note,
        entry=entry.name,
        scale=scale,
        command=" ".join(
            ("python -m reproduce", entry.name, "--scale", scale, "--seeds", str(len(results.seeds)))
        ),
        seeds=list(results.seeds),
        data=sorted({record.data for record in records if record.data}),
        started=min(record.started for record in records),
        seconds=round(sum(record.seconds for record in records), 1),
        machine=records[0].machine,
        arms=arms,
        claims=[
            filled(
                ClaimSummary,
                claim,
                verdict,
                doubt="" if verdict.held else claim.doubt,
            )
            for claim, verdict in judged
        ],
    )


def _arm(entry: Entry, arm: str, results: Results, records: Sequence[Record]) -> ArmSummary:
    figures = [name for name in results.figures[arm][0] if all(name in run for run in results.figures[arm])]
    return ArmSummary(
        arm=arm,
        settings={
            key: value for key, value in records[0].settings.items() if key not in ("seed", "federation.seed")
        },
        mean={name: results.mean(arm, name) for name in figures},
        deviation={name: results.deviation(arm, name) for name in figures},
        values={name: results.of(arm, name).tolist() for name in figures},
        paper=dict(entry.published.get(arm, {})),
        seconds=round(sum(record.seconds for record in records), 1),
    )
