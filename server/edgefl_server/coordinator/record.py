"""Record of the devices' participation: tasks, reports, and lost tasks. Pure data and functions; the journal stores it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from immutables import Map

from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices
from edgefl_server.coordinator.roster import base_of

WINDOW = 8
"""Number of last rounds from which the share of lost tasks is estimated."""


class Participation(msgspec.Struct, frozen=True, array_like=True):
    """Participation of one device in a run.

    Attributes:
        tasks: Number of its tasks.
        reports: Number of its accepted updates.
        last: Number of the round of its last task.
    """

    tasks: int
    reports: int
    last: int


class Turnout(msgspec.Struct, frozen=True, array_like=True):
    """Result of a tier's tasks in one round.

    A task that is still open when the round reaches its goal has no known result, unless its device is offline.

    Attributes:
        tasks: Number of tasks with a known result.
        lost: Number of these that brought no accepted update.
    """

    tasks: int
    lost: int


NOBODY = Participation(0, 0, 0)


@dataclass(frozen=True)
class ParticipationRecord:
    """Participation of all devices in a run.

    Attributes:
        of: Participation by device, of each that ever had a task.
        turnouts: Turnouts of the last rounds by tier, the newest last.
        newest: Round of the newest turnout.
        reports: Sum of the devices' reports.
        squares: Sum of the squares of the devices' reports.
    """

    of: Map[str, Participation] = field(default_factory=Map)
    turnouts: tuple[Mapping[str, Turnout], ...] = ()
    newest: int = 0
    reports: int = 0
    squares: int = 0

    @classmethod
    def read(
        cls, participations: Mapping[str, Participation], turnouts: tuple[Mapping[str, Turnout], ...]
    ) -> ParticipationRecord:
        """Return a record built from stored rows.

        Args:
            participations: Participation by device.
            turnouts: Tasks and lost tasks by tier of each round, the newest last.
        """
        counts = [each.reports for each in participations.values()]
        squares = sum(count * count for count in counts)
        return cls(Map(participations), turnouts[-WINDOW:], reports=sum(counts), squares=squares)

    def turnout(self, number: int) -> Mapping[str, Turnout]:
        """Return the turnout (tasks and lost tasks) by tier of round ``number`` if it is the newest; otherwise an
        empty mapping.
        """
        return self.turnouts[-1] if self.turnouts and number == self.newest else {}

    def of_round(self, number: int, names: Iterable[str]) -> dict[str, Participation]:
        """Return the participation of those devices among ``names`` whose last task was in round ``number``."""
        found = {name: self.of.get(name, NOBODY) for name in names}
        return {name: each for name, each in found.items() if each.last == number}

    def fairness(self, devices: int) -> float | None:
        """Return Jain's index of the numbers of accepted updates of ``devices`` devices, or None before the first
        update.

        For reports x of n devices it is (sum x)^2 / (n * sum x^2): 1 if all have as many, 1 / n if one has them all.
        Devices without a task count too.
        """
        most = max(devices, len(self.of))
        return self.reports**2 / (most * self.squares) if self.squares else None

    def lost_share(self, tier: str = "") -> float | None:
        """Return the share of tasks in the last rounds that brought no update; None if no task has a known result.

        ``tier`` limits it to one tier, including the tasks with that tier's candidate bundle; "" for all tiers.
        """
        tallies = [
            each for turnout in self.turnouts for name, each in turnout.items() if tier in ("", base_of(name))
        ]
        tasks = sum(each.tasks for each in tallies)
        return sum(each.lost for each in tallies) / tasks if tasks else None


def record_round(
    record: ParticipationRecord, number: int, tasks: Assignments, turnout: Mapping[str, Turnout]
) -> ParticipationRecord:
    """Return ``record`` with the tasks of round ``number`` added, and with its ``turnout`` (tasks and lost tasks by
    tier).

    The round must not receive more updates.
    """
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
    """Return the turnout of a round by tier, from its ``tasks`` and the known ``devices``.

    ``late`` is True if the deadline has passed, so that open tasks count as lost. Otherwise an open task counts only
    if its device is offline.
    """
    counts: dict[str, Turnout] = {}
    for task in tasks.values():
        if not _is_known(task, devices, late=late):
            continue
        before = counts.get(task.tier, Turnout(0, 0))
        counts[task.tier] = Turnout(before.tasks + 1, before.lost + (task.status != "accepted"))
    return counts


def _is_known(task: Assignment, devices: Devices, *, late: bool) -> bool:
    return task.status != "open" or late or task.device in devices.away
