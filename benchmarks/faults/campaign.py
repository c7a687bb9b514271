"""Runs under random faults, each compared with the run that nobody disturbed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.faults.federation import ROUNDS, lab_of, small_federation
from edgefl.config import Federation
from edgefl.errors import EdgeflError
from edgefl.lab.faults.schedule import Fault, Schedule, random_schedule
from edgefl.lab.lab import Restart, ServerEvent
from edgefl.setup.tiers import device_names
from edgefl.system.structs import filled

_MOST_REFUSALS = 5
_PATIENCE_S = 240.0


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule. ``same``: the run ended with the weights of the undisturbed one; ``why`` says why not.

    ``happened``: how many of the faults were begun; one whose process was gone, or whose time came after the end, was not.
    ``refusals`` are the words with which a process ended the run, as on a full disk; the run was taken up again without
    further faults. ``restarts``: processes that were started again. ``broker``: the kind of it.
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


@dataclass
class FaultyRun:
    """What one run told: digests of its rounds' weights, and how many updates each had."""

    digests: dict[int, str] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    restarts: int = 0
    refusals: list[str] = field(default_factory=list)
    happened: int = 0
    ended: bool = False


def undisturbed(federation: Federation, folder: Path) -> FaultyRun:
    """The same run without faults. EdgeflError if it does not end."""
    ran = FaultyRun()
    _attempt(federation, folder, None, ran, _PATIENCE_S)
    return ran


def disturbed(
    federation: Federation,
    folder: Path,
    schedule: Schedule,
    calm: FaultyRun,
    tell: Callable[[str], None] = lambda _: None,
) -> FaultRow:
    """The run under ``schedule``, and how it compares with ``calm``."""
    began, ran, why = time.monotonic(), FaultyRun(), ""
    faults: Schedule | None = schedule
    while not ran.ended and not why:
        try:
            _attempt(federation, folder, faults, ran, _PATIENCE_S)
        except EdgeflError as error:
            ran.refusals.append(error.message)
            faults = None
            tell(f"seed {schedule.seed}: {error.message}; taken up again")
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


def _attempt(
    federation: Federation, folder: Path, faults: Schedule | None, ran: FaultyRun, patience_s: float
) -> None:
    lab = lab_of(federation, folder)
    try:
        if faults is not None:
            lab.disturb(faults)
        lab.start()
        for news in lab.events(patience_s=patience_s):
            if isinstance(news, Restart):
                ran.restarts += 1
            else:
                _take(news, ran)
        lab.finish()
        ran.ended = True
    finally:
        ran.happened += lab.faults_happened
        lab.stop()


def _take(news: ServerEvent, ran: FaultyRun) -> None:
    event = news.event
    if event.get("event") == "roundclosed":
        ran.digests[event["round"]] = event["weights_sha256"]
        ran.reports[event["round"]] = event["reports"]
    elif event.get("event") == "finished":
        ran.digests.setdefault(event["rounds"], event["weights_sha256"])


def _difference(ran: FaultyRun, calm: FaultyRun) -> str:
    """The first round whose weights or number of updates are others; empty where there is none."""
    for number, digest in sorted(calm.digests.items()):
        if number in ran.reports and ran.reports[number] != calm.reports[number]:
            return f"round {number} has {ran.reports[number]} updates, undisturbed {calm.reports[number]}"
        if ran.digests.get(number) != digest:
            return f"round {number} ended with weights {ran.digests.get(number, '')[:12]!r}, undisturbed {digest[:12]!r}"
    return ""


class FaultCampaign:
    """Measures schedules. ``keep``: where the folders of runs with other weights go.

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
        """The schedules of these seeds."""
        devices = device_names(self.federation)
        return [random_schedule(seed, devices, ROUNDS) for seed in seeds]

    def measure(self, schedule: Schedule, tell: Callable[[str], None]) -> FaultRow:
        """The run under ``schedule``. EdgeflError if the undisturbed one does not end."""
        if self._calm is None:
            tell("the undisturbed run")
            self._calm = undisturbed(self.federation, self._folder / "calm")
        tell(f"the schedule of seed {schedule.seed}")
        folder = self._folder / f"seed-{schedule.seed}"
        row = disturbed(self.federation, folder, schedule, self._calm, tell)
        if not row.same and self._keep is not None:
            shutil.copytree(folder, self._keep / folder.name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return row
