"""Known devices, and the tasks of a round, as immutable maps: an event costs the same however many devices there are.

Both are persistent maps, whose changed copies share what is the same. They keep the counts that the coordinator needs for
each event, such as the devices that are present and the tasks that are answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from immutables import Map

from edgefl_server.coordinator.roster import RosterEntry

Status = Literal["open", "accepted", "rejected", "declined", "expired", "stale"]
"""Status of a task. Only in asynchronous rounds: ``expired``, its time is over; ``stale``, too many versions followed."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Task of a device in a round.

    Attributes:
        device: Name of the device.
        tier: Tier that it trains.
        seed: Seed of its training.
        nonce: Identifier of the task, which the device's answer repeats.
        weight_limit: Largest weight that its update may claim.
        status: Status of the task.
        reason: Why the device declined, or why its update was refused.
        round: Round whose model it begins from.
        until: End of its time in epoch seconds, in asynchronous rounds.
        lost_turn: True if the server requested the update and the device did not upload it in time.
    """

    device: str
    tier: str
    seed: int
    nonce: str
    weight_limit: int = 1
    status: Status = "open"
    reason: str = ""
    round: int = 0
    until: float = 0.0
    lost_turn: bool = False


class Devices(Mapping[str, RosterEntry]):
    """Immutable map of the known devices by name, with counts that are kept up to date.

    Attributes:
        ready: Number of usable devices that are online.
        left_out: Number of devices with a tier that are online and excluded by their conditions.
        away: Devices that are offline, by name.
        members: Number of devices with a tier.
    """

    __slots__ = ("_all", "away", "left_out", "members", "ready")

    def __init__(self, devices: Mapping[str, RosterEntry] | None = None) -> None:
        known = dict(devices or {})
        self._all = Map(known)
        self.away = Map({name: device for name, device in known.items() if not device.online})
        self.ready = sum(map(_ready, known.values()))
        self.left_out = sum(map(_left_out, known.values()))
        self.members = sum(map(_has_tier, known.values()))

    def with_device(self, device: RosterEntry) -> Devices:
        """Return a copy of the map with ``device`` added; it replaces a device of the same name."""
        return self._replace(device.name, device)

    def without(self, name: str) -> Devices:
        """Return a copy of the map without the device ``name``; an equal map if there is none."""
        return self._replace(name, None)

    def _replace(self, name: str, device: RosterEntry | None) -> Devices:
        before, after = self._all.get(name), Devices.__new__(Devices)
        after.ready, after.left_out, after.members = (
            count + (device is not None and holds(device)) - (before is not None and holds(before))
            for count, holds in ((self.ready, _ready), (self.left_out, _left_out), (self.members, _has_tier))
        )
        after._all, after.away = self._all, self.away
        if name in after.away:
            after.away = after.away.delete(name)
        if device is None:
            after._all = after._all.delete(name) if before is not None else after._all
            return after
        after._all = after._all.set(name, device)
        if not device.online:
            after.away = after.away.set(name, device)
        return after

    def here(self, now: float, grace_s: float) -> int:
        """Return the number of usable devices that are online, or have been offline for less than ``grace_s`` seconds.

        ``now`` is in epoch seconds.
        """
        return self.ready + sum(device.eligible(now, grace_s) for device in self.away.values())

    def __getitem__(self, name: str) -> RosterEntry:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._all


class Assignments(Mapping[str, Assignment]):
    """Immutable map of a round's tasks by device, in the order of the devices' names.

    Args:
        tasks: The tasks.
        accepted: Number of accepted answers to tasks that are not among them.

    Attributes:
        open: Tasks without an answer.
    """

    __slots__ = ("_all", "_counts", "_names", "open")

    def __init__(self, tasks: Mapping[str, Assignment], *, accepted: int = 0) -> None:
        self._names = tuple(sorted(tasks))
        self._all = Map(tasks)
        self.open = Map({name: task for name, task in tasks.items() if task.status == "open"})
        self._counts: dict[Status, int] = dict.fromkeys(get_args(Status), 0)
        self._counts["accepted"] = accepted
        for task in tasks.values():
            self._counts[task.status] += 1

    def with_answer(self, name: str, status: Status, reason: str = "") -> Assignments:
        """Return a copy in which the task of device ``name`` has this ``status``, and ``reason`` if it was refused or
        declined.

        Only an open task changes: for later answers, and for devices without a task, the map itself is returned.
        """
        task = self.open.get(name)
        if task is None or status == "open":
            return self
        after = Assignments.__new__(Assignments)
        after._names = self._names
        after._all = self._all.set(name, replace(task, status=status, reason=reason))
        after.open = self.open.delete(name)
        after._counts = {**self._counts, "open": len(after.open), status: self._counts[status] + 1}
        return after

    def with_lost_turn(self, name: str) -> Assignments:
        """Return a copy in which the open task of device ``name`` is marked as not uploaded in time (``lost_turn``).

        If the device has no open task, the map itself is returned.
        """
        if (task := self.open.get(name)) is None:
            return self
        return self.with_tasks([replace(task, lost_turn=True)])

    def with_tasks(self, tasks: Sequence[Assignment]) -> Assignments:
        """Return a copy with the new ``tasks`` added, one per device; a device's earlier task must not be open.

        :meth:`count` still includes the answers to tasks that are replaced.
        """
        new = {task.device: task for task in tasks}
        after = Assignments.__new__(Assignments)
        fresh = [name for name in new if name not in self._all]
        after._names = tuple(sorted((*self._names, *fresh))) if fresh else self._names
        after._all, after.open = self._all.update(new), self.open.update(new)
        after._counts = {**self._counts, "open": len(after.open)}
        return after

    def later(self, seconds: float) -> Assignments:
        """Return a copy in which the time limit of every task ends ``seconds`` later."""
        moved = {name: replace(task, until=task.until + seconds) for name, task in self._all.items()}
        after = Assignments(moved)
        after._counts = self._counts
        return after

    def count(self, status: Status) -> int:
        """Return the number of tasks with this status, including accepted ones that were replaced."""
        return self._counts[status]

    def __getitem__(self, name: str) -> Assignment:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._all


def _ready(device: RosterEntry) -> bool:
    return device.online and device.usable


def _has_tier(device: RosterEntry) -> bool:
    return bool(device.tier)


def _left_out(device: RosterEntry) -> bool:
    return device.online and bool(device.tier) and bool(device.unfit)
