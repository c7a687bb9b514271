"""What the rounds of a run say of its devices: how often each took part, and how many tasks were not answered. Pure data
and functions; the journal has all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from immutables import Map

from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices
from edgefl_server.coordinator.tier_names import base_of

WINDOW = 8
"""Rounds from which it is estimated how many devices answer."""


class Participation(msgspec.Struct, frozen=True, array_like=True):
    """Of one device: the tasks that it was given, the updates of it that counted, and the round of its last task."""

    tasks: int
    reports: int
    last: int


class Turnout(msgspec.Struct, frozen=True, array_like=True):
    """Of a tier in one round: tasks of which is known what came of them, and those of which no update came.

    A task that is still open when others have met the round's goal says nothing, unless its device is offline.
    """

    tasks: int
    lost: int


NOBODY = Participation(0, 0, 0)


@dataclass(frozen=True)
class Record:
    """``of``: each device that ever had a task. ``turnouts``: of the last rounds, by tier, the newest last, which is that of
    round ``newest``.

    ``reports`` and ``squares`` are the sums of the devices' reports and of their squares.
    """

    of: Map[str, Participation] = field(default_factory=Map)
    turnouts: tuple[Mapping[str, Turnout], ...] = ()
    newest: int = 0
    reports: int = 0
    squares: int = 0

    @classmethod
    def read(
        cls, participations: Mapping[str, Participation], turnouts: tuple[Mapping[str, Turnout], ...]
    ) -> Record:
        """As the journal has it."""
        counts = [each.reports for each in participations.values()]
        squares = sum(count * count for count in counts)
        return cls(Map(participations), turnouts[-WINDOW:], reports=sum(counts), squares=squares)

    def turnout(self, number: int) -> Mapping[str, Turnout]:
        """That of round ``number``, if it is the newest; else empty."""
        return self.turnouts[-1] if self.turnouts and number == self.newest else {}

    def of_round(self, number: int, names: Iterable[str]) -> dict[str, Participation]:
        """Those of ``names`` whose last task was of round ``number``."""
        found = {name: self.of.get(name, NOBODY) for name in names}
        return {name: each for name, each in found.items() if each.last == number}

    def fairness(self, devices: int) -> float | None:
        """Jain's index of the reports of so many ``devices``: 1 if all have as many, 1 / n if one has them all. None before
        there are any."""
        most = max(devices, len(self.of))
        return self.reports**2 / (most * self.squares) if self.squares else None

    def lost_share(self, tier: str = "") -> float | None:
        """The share of the tasks of the last rounds to which no update came, of one tier, with its candidate, or of
        all; None if there were none."""
        tallies = [
            each for turnout in self.turnouts for name, each in turnout.items() if tier in ("", base_of(name))
        ]
        tasks = sum(each.tasks for each in tallies)
        return sum(each.lost for each in tallies) / tasks if tasks else None


def recorded(record: Record, number: int, tasks: Assignments, turnout: Mapping[str, Turnout]) -> Record:
    """With the tasks of round ``number``, which takes no more updates."""
    after, reports, squares = record.of.mutate(), record.reports, record.squares
    for name, task in tasks.items():
        before = after.get(name, NOBODY)
        reported = task.status == "accepted"
        after[name] = Participation(before.tasks + 1, before.reports + reported, number)
        reports += reported
        squares += (2 * before.reports + 1) * reported
    record = replace(record, of=after.finish(), reports=reports, squares=squares)
    return (
        replace(record, turnouts=(*record.turnouts, turnout)[-WINDOW:], newest=number) if turnout else record
    )


def turnout_of(tasks: Assignments, devices: Devices, *, late: bool) -> dict[str, Turnout]:
    """What came of a round's tasks, by tier. ``late``: its deadline has passed."""
    counts: dict[str, Turnout] = {}
    for task in tasks.values():
        if not _is_known(task, devices, late=late):
            continue
        before = counts.get(task.tier, Turnout(0, 0))
        counts[task.tier] = Turnout(before.tasks + 1, before.lost + (task.status != "accepted"))
    return counts


def _is_known(task: Assignment, devices: Devices, *, late: bool) -> bool:
    return task.status != "open" or late or task.device in devices.away
