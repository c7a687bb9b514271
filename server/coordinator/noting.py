"""What a round that takes no more updates leaves in the record of its devices. Pure functions over the coordinator's
state."""

from __future__ import annotations

from dataclasses import replace

from server.coordinator.fleet import Assignments
from server.coordinator.record import recorded, turnout_of
from server.coordinator.states import OpenRound, State


def noted(state: State, current: OpenRound, now: float) -> State:
    """With what a round that takes no more updates says of its devices."""
    late, tasks = now >= current.deadline, current.assignments
    if current.buffered:  # what is still open is of a later round, too
        tasks = Assignments({name: task for name, task in tasks.items() if task.status != "open"})
    turnout = {} if current.whole else turnout_of(tasks, state.devices, late=late)
    return replace(state, record=recorded(state.record, current.number, tasks, turnout))
