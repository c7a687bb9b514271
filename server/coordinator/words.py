"""Reports on rounds that come to nothing, and the state that remembers them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.coordinator import attendance
from server.coordinator.fleet import Assignments
from server.coordinator.record import recorded, turnout_of
from server.coordinator.states import OpenRound, Rules, State

# What a round that takes no more updates leaves in the record of its devices. Pure functions over the coordinator's
# state.


def noted(state: State, current: OpenRound, now: float) -> State:
    """With what a round that takes no more updates says of its devices."""
    late, tasks = now >= current.deadline, current.assignments
    if current.buffered:  # what is still open is of a later round, too
        tasks = Assignments({name: task for name, task in tasks.items() if task.status != "open"})
    turnout = {} if current.whole else turnout_of(tasks, state.devices, late=late)
    return replace(state, record=recorded(state.record, current.number, tasks, turnout))


def too_few(rules: Rules, current: OpenRound) -> str:
    """Why a round is abandoned that lacks reports."""
    accepted, pending = current.count("accepted"), current.count("open")
    why = "the deadline passed" if pending else "every device has answered"
    declined = attendance.told({each.device: each.reason for each in current.with_status("declined")})
    return (
        f"round {current.number} is abandoned and the model unchanged: it needs {max(1, rules.min_reports)} reports, "
        f"{accepted} of {len(current.assignments)} devices sent a usable one and {why}; "
        + (f"declined: {declined}; " if declined else "")
        + "raise limits.round_deadline_s or lower round.min_reports"
    )


def nothing_trained(rules: Rules) -> str:
    """Why a run ends whose rounds all came to nothing."""
    begins = f"the first {rules.opening} of them only begin the method; " if rules.opening else ""
    return (
        f"all {rules.rounds} rounds are over, tries that were abandoned included, and none has trained the model: {begins}"
        "start over in another `out` with more rounds, or with what the abandoned ones lacked"
    )


def left_out(benched: Mapping[str, int]) -> str:
    """Return the warning about devices that are not selected before these rounds."""
    names = attendance.told({name: f"until round {until}" for name, until in benched.items()})
    return (
        f"left out where there are enough others: {names}; each spoiled its last rounds, by updates that were refused, by "
        "turns to upload that it lost, or by silence until the deadline"
    )
