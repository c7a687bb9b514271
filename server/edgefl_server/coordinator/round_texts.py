"""Texts and actions for rounds and runs that end without a model, and the record of a round's participation. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgefl.errors import DIVERGED
from edgefl.wire.mqtt.messages import WRONG_DATA
from edgefl.wire.mqtt.reasons import TEXTS
from edgefl_server.coordinator import attendance
from edgefl_server.coordinator.fleet import Assignments
from edgefl_server.coordinator.record import record_round, turnout_of
from edgefl_server.coordinator.states import OpenRound, RefuseRun, Rules, State

# What a round that takes no more updates leaves in the record of its devices. Pure functions over the coordinator's
# state.


def record_participation(state: State, current: OpenRound, now: float) -> State:
    """Return ``state`` with the participation of round ``current``, which receives no more updates, added to its record.

    ``now`` (epoch seconds) decides whether an open task counts as lost: only after the deadline, or if its device is
    offline.
    """
    late, tasks = now >= current.deadline, current.assignments
    if current.buffered:  # what is still open is of a later round, too
        tasks = Assignments({name: task for name, task in tasks.items() if task.status != "open"})
    turnout = {} if current.whole else turnout_of(tasks, state.devices, late=late)
    return replace(state, record=record_round(state.record, current.number, tasks, turnout))


COME_BACK = (
    "bring them back and start the server again with the same `out`, or start over in another with a longer "
    "limits.round_deadline_s, or with round.absent set to wait or partial"
)
_REPAIR = "correct the rows that these logs name, or leave them out (`edgefl device --bad-rows skip`), "
DIVERGED_RUN = (
    "training diverged on all devices that sent an update, none of which is finite; lower the learning rate (algorithm.lr), "
    "or bring the data near 0 to 1, and start over in another `out`"
)


def explain_too_few(rules: Rules, current: OpenRound) -> str:
    """Return the text for a round that is abandoned because it has too few reports, with the causes and remedies."""
    if current.evaluates:
        declined = attendance.format_devices(
            {each.device: each.reason for each in current.with_status("declined")}
        )
        answers = f"; declined: {declined}" if declined else ""
        purpose = "measuring" if current.measures else "evaluation"
        return f"{purpose} round {current.number} has no result: no device sent a report that can be used{answers}"
    accepted, pending = current.count("accepted"), current.count("open")
    why = "the deadline passed" if pending else "every device has answered"
    refused, declined = (
        attendance.format_devices({each.device: each.reason for each in current.with_status(status)})
        for status in ("rejected", "declined")
    )
    late = "raise limits.round_deadline_s or " if pending or not (refused or declined) else ""
    return (
        f"round {current.number} is abandoned and the model unchanged: it needs {max(1, rules.min_reports)} reports, "
        f"{accepted} of {len(current.assignments)} devices sent a usable one and {why}; "
        + (f"refused: {refused}; " if refused else "")
        + (f"declined: {declined}; " if declined else "")
        + (f"{late}lower round.min_reports" if late or accepted else "")
    ).removesuffix("; ")


def diverged(current: OpenRound) -> bool:
    """Return True if updates arrived and the server refused every one because it was not finite.

    Devices without an update do not count. False if no update arrived.
    """
    refused = current.with_status("rejected")
    return (
        not current.count("accepted") and bool(refused) and all(DIVERGED in each.reason for each in refused)
    )


def all_diverged(current: OpenRound) -> bool:
    """Return True if at least half of the round's devices sent an update and none of the updates is finite.

    The share matters because a few devices that send NaN while all others are away must not end a run.
    """
    return diverged(current) and 2 * current.count("rejected") >= len(current.assignments)


def all_declined(current: OpenRound) -> dict[str, str]:
    """Return the reason of each device that declined, by name; an empty dict if any device sent an update."""
    if current.count("accepted") or current.count("rejected"):
        return {}
    return {each.device: each.reason for each in current.with_status("declined")}


def refuse_untrained(rules: Rules, *, diverged: bool, declined: Mapping[str, str]) -> RefuseRun:
    """Return the action that ends a run in which no round trained the model; its text names the cause and the remedy.

    Args:
        rules: Rules of the run.
        diverged: True if the last updates were not finite.
        declined: Reason codes of the devices that declined the last round, by device.
    """
    if diverged:
        return RefuseRun(f"none of {rules.rounds} rounds has trained the model: {DIVERGED_RUN}", diverged)
    if declined:
        reasons = {code: TEXTS.get(code, "") for code in dict.fromkeys(declined.values())}
        meant = "; ".join(f"{code}: {text}" for code, text in reasons.items() if text)
        repair = _REPAIR if WRONG_DATA in reasons else ""
        return RefuseRun(
            f"none of {rules.rounds} rounds has trained the model: no device sent an update. The last round was declined "
            f"by {attendance.format_devices(declined)}; {meant + '; ' if meant else ''}{repair}then start over in another "
            "`out`"
        )
    begins = f"the first {rules.opening} of them only begin the method; " if rules.opening else ""
    return RefuseRun(
        f"all {rules.rounds} rounds are over, tries that were abandoned included, and none has trained the model: {begins}"
        "start over in another `out` with more rounds, or with what the abandoned ones lacked"
    )


def left_out(benched: Mapping[str, int]) -> str:
    """Return the text of the warning about suspended devices. ``benched``: by device, the first round that may select
    it again.
    """
    names = attendance.format_devices({name: f"until round {until}" for name, until in benched.items()})
    return (
        f"left out where there are enough others: {names}; each spoiled its last rounds, by updates that were refused, by "
        "turns to upload that it lost, or by silence until the deadline"
    )


def lost(state: State, gone: dict[str, str]) -> RefuseRun:
    """Return the action that ends a run because devices that it needs were offline for too long. ``gone``: reason by
    device.
    """
    return RefuseRun(
        f"round {state.next_round} cannot open: the algorithm needs all {len(state.members)} devices in every round, and "
        f"lacks {attendance.format_devices(gone)}; {COME_BACK}"
    )
