"""Asynchronous rounds (FedBuff, Nguyen et al. 2022): tasks begin whenever a device is free, and end in later rounds.

``Rules.concurrency`` devices have a task at any time. Each task begins from the model of its round, and may be answered at
most ``Rules.max_staleness`` rounds later. A round ends with ``Rules.buffer`` accepted updates, whatever models they began
from, and the next one opens at once with the tasks that are still open. A task ends in one of these ways, and another
device, or the same, gets a task in the same step:

* *accepted*, *rejected* or *declined* by its device's answer;
* *expired*: it took longer than ``Rules.deadline_s``, or its device was offline for longer than the grace;
* *stale*: more than ``Rules.max_staleness`` rounds ended since it began.

A device whose task ended without an accepted update gets no other one before the next round, or before the end of that
task's time. Otherwise a device that declines everything would get one task after the other.

Pure functions, called by :mod:`edgefl_server.coordinator.machine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edgefl_server.coordinator import attendance, claims, roster, selection
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.states import Actions, OpenRound, ReassignTasks, Rules, StartRound, State


def open_round(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    """Open the next round with the open tasks of earlier rounds and new tasks for free places.

    Returns:
        The new state, and the actions: one that opens the round, and one that ends stale tasks, if there are any.
    """
    number, carried = state.next_round, state.carried.open.values()
    stale = [replace(task, status="stale") for task in carried if number - task.round > rules.max_staleness]
    going_on = {task.device: task for task in carried if number - task.round <= rules.max_staleness}
    names = (name for name in attendance.candidates(rules, state, now) if name not in going_on)
    until = now + rules.deadline_s
    new = {
        name: selection.assign(rules, state, number, state.devices[name], until=until)
        for name in roster.sample(rules.seed, number, names, _count_free(rules, state, len(going_on)))
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
    over = (ReassignTasks(tuple(stale), ()),) if stale else ()
    return after, (*over, StartRound(opened))


def continue_round(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    """End expired tasks of an asynchronous round, and draw new tasks for free places.

    Returns:
        The new state, and a ReassignTasks action, or no action if no task changed.
    """
    over = tuple(_find_expired(rules, state, current, now))
    tasks = current.assignments
    for each in over:
        tasks = tasks.with_answer(each.device, each.status)
    new = _draw_tasks(rules, state, replace(current, assignments=tasks), now)
    if not over and not new and now < current.deadline:
        return state, ()
    after = replace(current, assignments=tasks.with_tasks(new), drawn=current.drawn + len(new))
    after = replace(after, deadline=_next_end(rules, after, now))
    return replace(state, round=after), (ReassignTasks(over, new),) if over or new else ()


def wake_at(rules: Rules, state: State, current: OpenRound) -> float:
    """Return the earliest epoch second at which a task of the asynchronous round may end without a message.

    A task ends then because its time is over, or because its device stayed offline for too long.
    """
    return min([current.deadline, *(ends for _, ends in _find_away(rules, state, current))])


def _count_free(rules: Rules, state: State, at_work: int) -> int:
    """Return the number of tasks that may begin besides the ``at_work`` open ones; 0 while an operator holds the run."""
    return 0 if state.held else max(0, (rules.concurrency or len(state.devices)) - at_work)


def _draw_tasks(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[Assignment, ...]:
    """Return new tasks of the round, for as many devices as may have one besides the open tasks.

    They are drawn at random among the candidates that have none.
    """
    free = _count_free(rules, state, current.count("open"))
    if not free:
        return ()
    names = [name for name in attendance.candidates(rules, state, now) if not _is_busy(current, name, now)]
    draw = f"{current.number}.{current.drawn}"
    until = now + rules.deadline_s
    return tuple(
        selection.assign(
            rules, state, current.number, state.devices[name], turn=current.drawn + place, until=until
        )
        for place, name in enumerate(roster.sample(rules.seed, draw, names, free), 1)
    )


def _is_busy(current: OpenRound, name: str, now: float) -> bool:
    """Return True if the device has an open task, or a task that failed and whose time is not over yet."""
    task = current.assignments.get(name)
    if task is None or task.status in ("accepted", "expired"):
        return False
    return task.status == "open" or now < task.until


def _find_expired(rules: Rules, state: State, current: OpenRound, now: float) -> Iterator[Assignment]:
    """Yield the open tasks that end now, with status ``expired``.

    Their time is over, or their device stayed offline for longer than ``offline_grace_s``.
    """
    late: Iterable[Assignment] = current.assignments.open.values() if now >= current.deadline else ()
    ended = {task.device: task for task in late if task.until <= now}
    ended |= {task.device: task for task, ends in _find_away(rules, state, current) if ends <= now}
    for name in sorted(ended):
        yield replace(ended[name], status="expired")


def _find_away(rules: Rules, state: State, current: OpenRound) -> Iterator[tuple[Assignment, float]]:
    """Yield (open task, epoch second at which it expires) for each open task whose device is offline."""
    waited, away = current.assignments.open, state.devices.away
    for name in waited if len(waited) < len(away) else away:
        device, task = away.get(name), waited.get(name)
        if device is not None and task is not None:
            yield task, attendance.grace_ends(rules, device, task.until - rules.deadline_s)


def _next_end(rules: Rules, current: OpenRound, now: float) -> float:
    """Return the earliest epoch second after ``now`` at which a task's time ends; ``deadline_s`` from now if there is
    none.
    """
    ends = (task.until for task in current.assignments.values() if task.status != "accepted")
    return min((each for each in ends if each > now), default=now + rules.deadline_s)
