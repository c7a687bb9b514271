"""``python -m benchmarks faults``: runs under random faults, each compared with an undisturbed run."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.federations import ROUNDS, lab_of, small_federation
from benchmarks.options import BrokerKind, Json
from benchmarks.results import bench
from edgefl.config import Federation
from edgefl.errors import EdgeflError
from edgefl.lab.faults.schedule import BROKER, EVERYBODY, KINDS, SERVER, Fault, Schedule, load_schedule
from edgefl.lab.lab import Restart
from edgefl.setup.tiers import device_names
from edgefl.system.structs import filled

_MOST_REFUSALS = 5
_TIMEOUT_S = 240.0


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule.

    Attributes:
        same: True if the run ended with the weights of the undisturbed one; ``why`` has the reason if not.
        happened: faults that began. One whose process had ended, or whose time came after the run, did not.
        refusals: errors with which a process ended the run, as on a full disk. The run was resumed without faults.
        restarts: processes that were started again.
        broker: kind of the broker.
    """

    seed: int
    broker: str
    faults: tuple[Fault, ...]
    happened: int
    rounds: int
    same: bool
    why: str
    refusals: tuple[str, ...]
    restarts: int
    seconds: float


def faults(
    schedules: Annotated[int, typer.Option(min=1, help="how many, each from a seed of its own")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 1,
    schedule: Annotated[
        Path | None, typer.Option(help="a file of faults (TOML or JSON) instead of random ones")
    ] = None,
    broker: BrokerKind = "auto",
    keep: Annotated[
        Path | None, typer.Option(help="folder for what runs with other weights leave behind")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train under random faults and compare each run with the same run without faults.

    Three devices train a small model for three rounds over links that are slow, cut, half open, stalled or send packets
    twice; processes are killed and stopped, disks are full, clocks jump. A row has the seed, its faults, and whether the run
    ended with the weights of the undisturbed one, or why not; refusals are errors of a process that ended the run, which is
    then resumed. The exit code is 1 if a row has other weights.

    Seeds are --seed, --seed + 1, and so on: `--seed 17 --schedules 1` runs the faults of seed 17 again. A row's faults as
    {"seed": 17, "faults": [...]} in a JSON file are a schedule for `edgefl run --faults FILE`, and for --schedule here.

    Examples:

      python -m benchmarks faults --schedules 20 --json

      python -m benchmarks faults --seed 17 --schedules 1 --keep runs/seed-17
    """

    with FaultCampaign(broker=broker, keep=keep) as campaign:
        cases = [load_schedule(schedule)] if schedule else campaign.random(range(seed, seed + schedules))
        rows = bench(
            "faults", "runs under faults", cases, campaign.measure, _fault_columns, as_json, _fault_line
        )
    if not all(row.same for row in rows):
        raise typer.Exit(1)


def _fault_line(row: FaultRow) -> str:
    faults = "; ".join(map(str, row.faults))
    refused = f", refused {len(row.refusals)} times" if row.refusals else ""
    return f"seed {row.seed}, {row.seconds:g} s{refused}: {row.why or 'same weights'} ({faults})"


def _fault_columns(row: FaultRow) -> dict[str, Any]:
    return {
        "seed": row.seed,
        "faults": ", ".join(fault.kind for fault in row.faults),
        "rounds": row.rounds,
        "same": row.same,
        "refused": len(row.refusals),
        "s": row.seconds,
    }


class FaultCampaign:
    """Measurement of fault schedules against one undisturbed run.

    Args:
        broker: kind of the broker.
        keep: folder for the folders of runs with other weights.

    >>> with FaultCampaign(broker="auto") as campaign:
    ...     rows = [campaign.measure(each, print) for each in campaign.random(range(1, 4))]
    """

    def __init__(self, *, broker: str, keep: Path | None = None) -> None:
        self.federation = small_federation(broker=broker)
        self._keep = keep
        self._calm: FaultyRun | None = None

    def __enter__(self) -> FaultCampaign:
        self._folder = Path(tempfile.mkdtemp(prefix="edgefl-faults-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def random(self, seeds: Iterable[int]) -> list[Schedule]:
        """Return the schedules of these seeds."""
        devices = device_names(self.federation)
        return [random_schedule(seed, devices, ROUNDS) for seed in seeds]

    def measure(self, schedule: Schedule, say: Callable[[str], None]) -> FaultRow:
        """Run under ``schedule``. Raises EdgeflError if the undisturbed run does not end."""
        if self._calm is None:
            say("the undisturbed run")
            calm = FaultyRun()
            _attempt(self.federation, self._folder / "calm", None, calm)
            self._calm = calm
        say(f"the schedule of seed {schedule.seed}")
        folder = self._folder / f"seed-{schedule.seed}"
        row = run_disturbed(self.federation, folder, schedule, self._calm, say)
        if not row.same and self._keep is not None:
            shutil.copytree(folder, self._keep / folder.name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return row


@dataclass
class FaultyRun:
    """Record of one run: digests of its rounds' weights, and the number of updates of each."""

    digests: dict[int, str] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    restarts: int = 0
    refusals: list[str] = field(default_factory=list)
    happened: int = 0
    ended: bool = False


def run_disturbed(
    federation: Federation,
    folder: Path,
    schedule: Schedule,
    calm: FaultyRun,
    say: Callable[[str], None] = lambda _: None,
) -> FaultRow:
    """Run under ``schedule`` and compare with ``calm``, the undisturbed run."""
    began, ran, why = time.monotonic(), FaultyRun(), ""
    faults: Schedule | None = schedule
    while not ran.ended and not why:
        try:
            _attempt(federation, folder, faults, ran)
        except EdgeflError as error:
            ran.refusals.append(error.message)
            faults = None
            say(f"seed {schedule.seed}: {error.message}; resuming")
            if len(ran.refusals) >= _MOST_REFUSALS:
                why = f"it ended {len(ran.refusals)} times: {error.message}"
    why = why or _difference(ran, calm)
    return filled(
        FaultRow,
        schedule,
        ran,
        broker=federation.broker.kind,
        rounds=len(ran.digests),
        same=not why,
        why=why,
        refusals=tuple(ran.refusals),
        seconds=round(time.monotonic() - began, 2),
    )


def _attempt(federation: Federation, folder: Path, faults: Schedule | None, ran: FaultyRun) -> None:
    lab = lab_of(federation, folder)
    try:
        if faults is not None:
            lab.disturb(faults)
        lab.start()
        for news in lab.events(patience_s=_TIMEOUT_S):
            if isinstance(news, Restart):
                ran.restarts += 1
            else:
                _record(news.event, ran)
        lab.finish()
        ran.ended = True
    finally:
        ran.happened += lab.faults_happened
        lab.stop()


def _record(event: Mapping[str, Any], ran: FaultyRun) -> None:
    if event.get("event") == "roundclosed":
        ran.digests[event["round"]] = event["weights_sha256"]
        ran.reports[event["round"]] = event["reports"]
    elif event.get("event") == "finished":
        ran.digests.setdefault(event["rounds"], event["weights_sha256"])


def _difference(ran: FaultyRun, calm: FaultyRun) -> str:
    """Return the first difference in weights or number of updates, or an empty text."""
    for number, digest in sorted(calm.digests.items()):
        if number in ran.reports and ran.reports[number] != calm.reports[number]:
            return f"round {number} has {ran.reports[number]} updates, undisturbed {calm.reports[number]}"
        if ran.digests.get(number) != digest:
            return f"round {number} ended with weights {ran.digests.get(number, '')[:12]!r}, undisturbed {digest[:12]!r}"
    return ""


_SHORT_S, _LONG_S = 0.2, 1.5


def random_schedule(seed: int, devices: Sequence[str], rounds: int, *, most: int = 4) -> Schedule:
    """Draw a schedule of one to ``most`` faults of any kind, deterministic by ``seed``.

    Args:
        seed: seed of the draw and of the schedule.
        devices: names of the devices, as possible targets.
        rounds: number of rounds in which faults may begin.
        most: largest number of faults.
    """
    rng = random.Random(seed)
    return Schedule(
        seed=seed, faults=tuple(_drawn(rng, devices, rounds) for _ in range(rng.randint(1, most)))
    )


def _drawn(rng: random.Random, devices: Sequence[str], rounds: int) -> Fault:
    kind = rng.choice(KINDS)
    targets = [SERVER, *devices, EVERYBODY]
    if kind in ("kill", "stop"):
        targets.append(BROKER)
    amount = {
        "delay": lambda: rng.uniform(0.02, 0.3),
        "reorder": lambda: rng.uniform(0.02, 0.3),
        "bandwidth": lambda: float(rng.choice((2_000, 10_000, 50_000))),
        "duplicate": lambda: rng.uniform(0.2, 1.0),
        "disk_full": lambda: float(rng.choice((0, 1 << 16, 1 << 20))),
        "clock": lambda: rng.choice((-1.0, 1.0)) * rng.choice((30.0, 3_600.0, 86_400.0)),
    }.get(kind, lambda: 0.0)()
    return Fault(
        kind=kind,  # type: ignore[arg-type]
        target=rng.choice(targets),
        round=rng.randint(1, rounds),
        after_s=round(rng.uniform(0.0, 0.8), 3),
        seconds=round(rng.uniform(_SHORT_S, _LONG_S), 3),
        amount=round(amount, 3),
    )
