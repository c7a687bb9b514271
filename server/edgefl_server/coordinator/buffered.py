"""Rounds as versions that wait for nobody (FedBuff, Nguyen et al. 2022): when devices are given work, and when it is
over.

The server keeps ``Rules.concurrency`` devices at work. Each task begins from the model of the round in which it is given,
and may be answered in a later one, at most ``Rules.max_staleness`` rounds on. A round ends with ``Rules.buffer`` accepted
updates, whatever they began from, and the next one opens at once with the tasks that are still open. So a task ends in one
of these ways, and its place is given to another device, or to the same, in the same step:

* *accepted*, *rejected* or *declined*, as its device answers;
* *expired*: it took longer than ``Rules.deadline_s``, or its device has been away for longer than the grace;
* *stale*: too many versions have come since it was given.

Whose task ended in another way than with an accepted update is given none again before the next round, or before the time
of that task would have been over: a device that declines everything must not be asked at every turn.

Pure functions, called by :mod:`edgefl_server.coordinator.machine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edgefl_server.coordinator import attendance, claims, roster
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.states import Actions, Open, OpenRound, Reassign, Rules, State
from edgefl_server.coordinator.tasks import assigned


def begun(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    """The next round, open, with the tasks that go on from earlier ones and new ones in the places that are free."""
    number, carried = state.next_round, state.carried.open.values()
    stale = [replace(task, status="stale") for task in carried if number - task.round > rules.max_staleness]
    going_on = {task.device: task for task in carried if number - task.round <= rules.max_staleness}
    names = (name for name in attendance.candidates(rules, state, now) if name not in going_on)
    until = now + rules.deadline_s
    new = {
        name: assigned(rules, state, number, state.devices[name], until=until)
        for name in roster.sample(rules.seed, number, names, _free(rules, state, len(going_on)))
    }
    opened = OpenRound(
        number,
        state.model_version,
        now,
        until,
        rules.buffer,
        Assignments({**going_on, **new}),
        state.position,
        older={each: state.versions[each] for each in sorted({task.round for task in going_on.values()})},
        drawn=len(new),
    )
    opened = replace(
        opened, weight_cap=claims.weight_cap(rules, opened), deadline=_next_end(rules, opened, now)
    )
    after = replace(state, phase="open", round=opened, carried=Assignments({}), versions={})
    over = (Reassign(tuple(stale), ()),) if stale else ()
    return after, (*over, Open(opened))


def gone_on(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    """The open round with the places of ended tasks given anew, as far as there are devices."""
    over = tuple(_over(rules, state, current, now))
    tasks = current.assignments
    for each in over:
        tasks = tasks.answered(each.device, each.status)
    new = _given(rules, state, replace(current, assignments=tasks), now)
    if not over and not new and now < current.deadline:
        return state, ()
    after = replace(current, assignments=tasks.with_tasks(new), drawn=current.drawn + len(new))
    after = replace(after, deadline=_next_end(rules, after, now))
    return replace(state, round=after), (Reassign(over, new),) if over or new else ()


def wake_at(rules: Rules, state: State, current: OpenRound) -> float:
    """When a task may be over (epoch seconds), if nobody says anything."""
    return min([current.deadline, *(ends for _, ends in _away(rules, state, current))])


def _free(rules: Rules, state: State, at_work: int) -> int:
    """How many devices may be given a task; none while an operator holds the run."""
    return 0 if state.held else max(0, (rules.concurrency or len(state.devices)) - at_work)


def _given(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[Assignment, ...]:
    """New tasks for as many devices as there are free places, drawn among those that have nothing to do."""
    free = _free(rules, state, current.count("open"))
    if not free:
        return ()
    names = [name for name in attendance.candidates(rules, state, now) if not _busy(current, name, now)]
    draw = f"{current.number}.{current.drawn}"
    until = now + rules.deadline_s
    return tuple(
        assigned(rules, state, current.number, state.devices[name], turn=current.drawn + place, until=until)
        for place, name in enumerate(roster.sample(rules.seed, draw, names, free), 1)
    )


def _busy(current: OpenRound, name: str, now: float) -> bool:
    """Whether a device is at work, or has just failed to be."""
    task = current.assignments.get(name)
    if task is None or task.status in ("accepted", "expired"):
        return False
    return task.status == "open" or now < task.until


def _over(rules: Rules, state: State, current: OpenRound, now: float) -> Iterator[Assignment]:
    """The open tasks whose time is over, or whose device is away for too long."""
    late: Iterable[Assignment] = current.assignments.open.values() if now >= current.deadline else ()
    ended = {task.device: task for task in late if task.until <= now}
    ended |= {task.device: task for task, ends in _away(rules, state, current) if ends <= now}
    for name in sorted(ended):
        yield replace(ended[name], status="expired")


def _away(rules: Rules, state: State, current: OpenRound) -> Iterator[tuple[Assignment, float]]:
    """The open tasks of devices that are offline, and when the grace of each ends, which begins with the task or later."""
    waited, away = current.assignments.open, state.devices.away
    for name in waited if len(waited) < len(away) else away:
        device, task = away.get(name), waited.get(name)
        if device is not None and task is not None:
            yield task, attendance.grace_ends(rules, device, task.until - rules.deadline_s)


def _next_end(rules: Rules, current: OpenRound, now: float) -> float:
    """When the next open task is over, or the next device may be asked again that has failed."""
    ends = (task.until for task in current.assignments.values() if task.status != "accepted")
    return min((each for each in ends if each > now), default=now + rules.deadline_s)
