"""What an entry's runs say together: means and deviations beside the paper's numbers, and which claims held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgefl.papers.entry import Entry, Scale
from edgefl.papers.record import Record
from edgefl.papers.results import Results
from edgefl.wire.errors import ConfigError


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
        entry=entry.name,
        what=entry.what,
        scale=scale,
        command=" ".join(
            ("edgefl reproduce", entry.name, "--scale", scale, "--seeds", str(len(results.seeds)))
        ),
        seeds=list(results.seeds),
        data=sorted({record.data for record in records if record.data}),
        started=min(record.started for record in records),
        seconds=round(sum(record.seconds for record in records), 1),
        machine=records[0].machine,
        arms=arms,
        claims=[
            ClaimSummary(
                rank=claim.rank,
                text=claim.text,
                paper=claim.paper,
                ours=verdict.ours,
                held=verdict.held,
                confidence=claim.confidence,
                doubt="" if verdict.held else claim.doubt,
                exact=claim.exact,
            )
            for claim, verdict in judged
        ],
        note=entry.note,
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
