"""One run of an arm, on disk: what was run, on what, how long it took, and what it told."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from edgefl.api.federation import load_federation
from edgefl.api.simulate import prepare_simulation
from edgefl.bench.common.machine import machine
from edgefl.papers.entry import Arm, Federated, Found, Scale, Work
from edgefl.simulator.row import Row
from edgefl.system.files import write_whole
from edgefl.wire.errors import ConfigError, EdgeflError

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
    found: Found


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
) -> tuple[Found, str, float]:
    """What was found, the data's name, and the seconds of rounds that were run before, by a process that was stopped."""
    if not isinstance(arm, Federated):
        return arm.compute(Work(seed, scale, folder, progress)), "", 0.0
    federation = load_federation(None, {**arm.settings, "federation.seed": seed})
    place = folder / _SIMULATION
    try:
        prepared = prepare_simulation(federation, place, resume=True)
    except ConfigError:
        # Another configuration, or other code: what was begun is of no use.
        prepared = prepare_simulation(federation, place, fresh=True)
    rounds = federation.federation.rounds
    run: set[int] = set()

    def watch(row: Row) -> None:
        run.add(row.round)
        progress(f"round {row.round} of {rounds}")

    ended = prepared.run(watch)
    before = sum(row.seconds for row in ended.history if row.round not in run)
    return arm.measure(ended), prepared.dataset.name, before
