"""Runs under random faults, each compared with the run that nobody disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edgefl.bench.faults.federation import lab_of
from edgefl.config import Federation
from edgefl.lab.faults.schedule import Fault, Schedule
from edgefl.lab.lab import Restarted, Said
from edgefl.wire.errors import EdgeflError

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
class Ran:
    """What one run told: digests of its rounds' weights, and how many updates each had."""

    digests: dict[int, str] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    restarts: int = 0
    refusals: list[str] = field(default_factory=list)
    happened: int = 0
    ended: bool = False


def undisturbed(federation: Federation, folder: Path) -> Ran:
    """The same run without faults. EdgeflError if it does not end."""
    ran = Ran()
    _attempt(federation, folder, None, ran, _PATIENCE_S)
    return ran


def disturbed(
    federation: Federation,
    folder: Path,
    schedule: Schedule,
    calm: Ran,
    tell: Callable[[str], None] = lambda _: None,
) -> FaultRow:
    """The run under ``schedule``, and how it compares with ``calm``."""
    began, ran, why = time.monotonic(), Ran(), ""
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
    return FaultRow(
        seed=schedule.seed,
        broker=federation.broker.kind,
        faults=schedule.faults,
        happened=ran.happened,
        rounds=len(ran.digests),
        same=not why,
        why=why,
        refusals=tuple(ran.refusals),
        restarts=ran.restarts,
        seconds=round(time.monotonic() - began, 2),
    )


def _attempt(
    federation: Federation, folder: Path, faults: Schedule | None, ran: Ran, patience_s: float
) -> None:
    lab = lab_of(federation, folder)
    try:
        if faults is not None:
            lab.disturb(faults)
        lab.start()
        for news in lab.events(patience_s=patience_s):
            if isinstance(news, Restarted):
                ran.restarts += 1
            else:
                _take(news, ran)
        lab.finish()
        ran.ended = True
    finally:
        ran.happened += lab.faults_happened
        lab.stop()


def _take(news: Said, ran: Ran) -> None:
    event = news.event
    if event.get("event") == "roundclosed":
        ran.digests[event["round"]] = event["weights_sha256"]
        ran.reports[event["round"]] = event["reports"]
    elif event.get("event") == "finished":
        ran.digests.setdefault(event["rounds"], event["weights_sha256"])


def _difference(ran: Ran, calm: Ran) -> str:
    """The first round whose weights or number of updates are others; empty where there is none."""
    for number, digest in sorted(calm.digests.items()):
        if number in ran.reports and ran.reports[number] != calm.reports[number]:
            return f"round {number} has {ran.reports[number]} updates, undisturbed {calm.reports[number]}"
        if ran.digests.get(number) != digest:
            return f"round {number} ended with weights {ran.digests.get(number, '')[:12]!r}, undisturbed {digest[:12]!r}"
    return ""
