"""Devices that spoil rounds: who has done so too often in a row is left out for a while. Pure functions.

A device spoils a round if its update is refused, if it is online and silent until the deadline (that of its task, where
versions wait for nobody), or if it says that it lost what the algorithm needs. One that was offline, or declines for a
reason of its own, spoils nothing: the round goes on without it at once, or after the grace. Where no device did well, the
round is to blame, and none of this counts.

A device that had a turn to upload, lost it while others waited, and never finished, spoils the round too, unless others did
well and it is offline by now or declined: its link broke. Where no device did well there is no such excuse. Otherwise it
could keep all others from doing well, and no round would be judged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound, Rules, State


def judged(rules: Rules, state: State, ended: OpenRound, now: float) -> State:
    """``state`` with what is held against the devices of a round that ended at ``now``."""
    judges_all = ended.count("accepted") > 0
    strikes, benched = dict(state.strikes), dict(state.benched)
    for name, assignment in ended.assignments.items():
        if assignment.status == "accepted":
            strikes.pop(name, None)
            benched.pop(name, None)
        elif (
            _spoiled(state, ended, assignment, now) or _wasted_turn(state, ended, assignment)
            if judges_all
            else _lost_turn(ended, assignment)
        ):
            strikes[name] = strikes.get(name, 0) + 1
            if strikes[name] >= rules.strikes:
                benched[name] = ended.number + 1 + rules.bench_rounds
    return replace(state, strikes=strikes, benched=benched)


def newly_benched(before: State, after: State) -> dict[str, int]:
    """Those that are left out since, and before which round they are not selected again."""
    return {name: until for name, until in after.benched.items() if before.benched.get(name, 0) < until}


def playing(state: State, names: Collection[str], least: int) -> list[str]:
    """Those of ``names`` that are not left out; all of them where fewer than ``least`` would remain."""
    chosen = [name for name in names if state.benched.get(name, 0) <= state.next_round]
    return chosen if len(chosen) >= max(1, least) else list(names)


def may_go_on_without(rules: Rules, state: State, names: Collection[str]) -> bool:
    """Whether a method that needs all of its devices may begin again without these."""
    left = len(state.members) - len(names)
    return rules.absent == "wait" and left >= max(1, rules.min_devices, rules.min_reports)


def _lost_turn(ended: OpenRound, assignment: Assignment) -> bool:
    still_works = ended.buffered and assignment.status == "open"
    return assignment.lost_turn and not still_works


def _wasted_turn(state: State, ended: OpenRound, assignment: Assignment) -> bool:
    device = state.devices.get(assignment.device)
    has_left = device is None or not device.online or assignment.status == "declined"
    return _lost_turn(ended, assignment) and not has_left


def _spoiled(state: State, ended: OpenRound, assignment: Assignment, now: float) -> bool:
    if assignment.status == "expired":
        device = state.devices.get(assignment.device)
        return device is not None and device.online
    if assignment.status == "open" and not ended.buffered:
        device = state.devices.get(assignment.device)
        return now >= ended.deadline and device is not None and device.online
    return assignment.status == "rejected" or assignment.reason == NO_CARRY
