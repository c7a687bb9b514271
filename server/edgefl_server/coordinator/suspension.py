"""Suspension of devices that spoil rounds: one that did so too often in a row is not selected for some rounds.

A device spoils a round if its update is refused, or if it reports that it lost what the algorithm needs. It also spoils one
if it is online and silent until the deadline (in asynchronous rounds: that of its task). A device that is offline, or that
declines for another reason, spoils nothing: the round continues without it. If no device sent an accepted update, the
round itself is to blame, and none of this counts.

A device that lost its turn to upload while others waited, and never finished, spoils the round too. If other devices sent
accepted updates, it is excused if it went offline or declined: its link broke. If none did, there is no excuse. Otherwise
one device could keep all others from finishing, and no round would ever count against it.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound, Rules, State


def count_strikes(rules: Rules, state: State, ended: OpenRound, now: float) -> State:
    """Return ``state`` with updated strikes and suspensions for the devices of an ended round.

    A strike is a spoiled round. ``rules.strikes`` of them in a row suspend a device; an accepted update clears both.

    Args:
        rules: Rules of the run.
        state: State of the coordinator.
        ended: The round, with its answers.
        now: Epoch seconds at its end.
    """
    judges_all = ended.count("accepted") > 0
    strikes, suspended = dict(state.strikes), dict(state.suspended)
    for name, assignment in ended.assignments.items():
        if assignment.status == "accepted":
            strikes.pop(name, None)
            suspended.pop(name, None)
        elif (
            _has_spoiled(state, ended, assignment, now) or _wasted_turn(state, ended, assignment)
            if judges_all
            else _lost_turn(ended, assignment)
        ):
            strikes[name] = strikes.get(name, 0) + 1
            if strikes[name] >= rules.strikes:
                suspended[name] = ended.number + 1 + rules.bench_rounds
    return replace(state, strikes=strikes, suspended=suspended)


def newly_suspended(before: State, after: State) -> dict[str, int]:
    """Return the devices whose suspension began or was extended between two states, by name.

    The value is the first round that may select the device again.
    """
    return {name: until for name, until in after.suspended.items() if before.suspended.get(name, 0) < until}


def without_suspended(state: State, names: Collection[str], least: int) -> list[str]:
    """Return those of ``names`` that the next round may select because they are not suspended.

    If fewer than ``least`` would remain, all of ``names`` are returned.
    """
    chosen = [name for name in names if state.suspended.get(name, 0) <= state.next_round]
    return chosen if len(chosen) >= max(1, least) else list(names)


def may_begin_without(rules: Rules, state: State, names: Collection[str]) -> bool:
    """Return True if an algorithm that needs all its members may begin again without the members ``names``.

    The rules must permit to wait (``absent``), and enough members must be left.
    """
    left = len(state.members) - len(names)
    return rules.absent == "wait" and left >= max(1, rules.min_devices, rules.min_reports)


def _lost_turn(ended: OpenRound, assignment: Assignment) -> bool:
    still_works = ended.buffered and assignment.status == "open"
    return assignment.lost_turn and not still_works


def _wasted_turn(state: State, ended: OpenRound, assignment: Assignment) -> bool:
    device = state.devices.get(assignment.device)
    has_left = device is None or not device.online or assignment.status == "declined"
    return _lost_turn(ended, assignment) and not has_left


def _has_spoiled(state: State, ended: OpenRound, assignment: Assignment, now: float) -> bool:
    if assignment.status == "expired":
        device = state.devices.get(assignment.device)
        return device is not None and device.online
    if assignment.status == "open" and not ended.buffered:
        device = state.devices.get(assignment.device)
        return now >= ended.deadline and device is not None and device.online
    return assignment.status == "rejected" or assignment.reason == NO_CARRY
