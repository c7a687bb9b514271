"""Attendance of devices: candidates for the next round, and devices that are missing from one, with reasons.

Most algorithms train with the devices that are online. If an algorithm needs all devices, those of its first round are its
*members*: no round opens or closes without one of them. A device that comes later lacks the earlier exchanges; it joins if
the method begins again. Pure functions over the coordinator's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator import roster, selection, suspension
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import OpenRound, Rules, State

_MAX_NAMED = 20
"""Largest number of devices that a message names."""


@dataclass(frozen=True)
class Presence:
    """Number of devices that are present for the next round, and the number that it needs to open.

    Attributes:
        known: Number of devices that are present.
        needed: Number of devices that the round needs.
        missing: Names of absent devices, if the algorithm needs particular ones.
        reason: Text that explains an unusual number: why more devices are needed than the rules require, or why some
            online devices do not count. Empty if there is nothing to explain.
    """

    known: int
    needed: int
    missing: tuple[str, ...] = ()
    reason: str = ""


def presence(rules: Rules, state: State, now: float) -> Presence:
    """Return the number of devices that the next round has, and the number that it needs to open.

    Args:
        rules: Rules of the run.
        state: State of the coordinator, between two rounds.
        now: Epoch seconds.
    """
    least = max(1, rules.min_reports)
    if not rules.all_needed:
        needed, here = _count_needed(rules, state, now), _count_present(rules, state, now)
        return Presence(here, needed, reason=_reason(rules, state, needed) if here < needed else "")
    names = candidates(rules, state, now)
    missing = tuple(name for name in names if not _is_there(state.devices.get(name)))
    needed = len(names) if state.members else max(len(names), least, rules.min_devices)
    return Presence(len(names) - len(missing), needed, missing)


def _count_needed(rules: Rules, state: State, now: float) -> int:
    """Return the number of devices that must be present before the next round opens.

    For algorithms that do not need all devices. It drops to ``min_reports`` when the round has waited long enough.
    """
    least = max(1, rules.min_reports)
    if now >= state.waiting_since + _patience_s(rules, state):
        return least
    if rules.gather_s:
        return max(least, 1 + _count_present(rules, state, now))
    return max(least, rules.min_devices) if state.next_round == 1 else selection.needed(rules, state)


def _patience_s(rules: Rules, state: State) -> float:
    """Return the seconds for which the next round waits for more devices than ``rules.min_reports``."""
    if rules.gather_s:
        return rules.gather_s
    if state.next_round == 1:
        return rules.ready_timeout_s
    return rules.selection.patience_s if rules.selection.quorum else 0.0


def _reason(rules: Rules, state: State, needed: int) -> str:
    reasons = []
    if rules.gather_s:
        reasons.append(f"the round takes all devices that connect within {rules.gather_s:g} s")
    if state.next_round > 1 and needed > max(1, rules.min_reports):
        lost = state.record.lost_share() or 0.0
        reasons.append(
            f"{lost:.0%} of the tasks of the last rounds were not answered, so that it takes {needed} devices to have "
            f"{max(1, rules.min_reports)} reports with probability {rules.selection.quorum:g}"
        )
    if left_out := state.devices.left_out:
        reasons.append(f"{left_out} more are online and left out for their conditions")
    return "; ".join(reasons)


def _count_present(rules: Rules, state: State, now: float) -> int:
    """Return the number of devices that the next round may select, for algorithms that do not need all devices."""
    if state.suspended:
        return len(candidates(rules, state, now))
    return state.devices.here(now, rules.offline_grace_s)


def candidates(rules: Rules, state: State, now: float) -> list[str]:
    """Return the names of the devices that the next round may select, sorted.

    If the algorithm needs all devices and its members (the devices of its first round) are fixed, these are the
    members.
    Otherwise they are the usable devices that are online, or offline for less than ``offline_grace_s``. Suspended ones
    are left out unless too few would remain.
    """
    if rules.all_needed and state.members:
        return sorted(state.members)
    names = roster.eligible(state.devices, now, rules.offline_grace_s)
    return (
        suspension.without_suspended(state, names, max(rules.min_devices, rules.min_reports))
        if state.suspended
        else names
    )


def opens_at(rules: Rules, state: State, now: float) -> float | None:
    """Return the epoch second at which the next round may open, or the run end, if no further message arrives.

    None if only a message can change that.
    """
    if not rules.all_needed:
        ready = state.waiting_since + _patience_s(rules, state)
        return ready if ready > now else None
    missing = presence(rules, state, now).missing
    if not state.members:
        return min((state.devices[name].seen + rules.offline_grace_s for name in missing), default=None)
    if rules.absent != "refuse":
        return None
    since = state.waiting_since
    return min((grace_ends(rules, state.devices.get(name), since) for name in missing), default=None)


def find_gone(rules: Rules, state: State, now: float) -> dict[str, str]:
    """Return the members that have been missing for too long, with the reason of each, by name. If there are any, the
    run ends.

    Members are the devices of the algorithm's first round. The result is empty unless the algorithm needs all of them
    and ``rules.absent`` is ``refuse``.
    """
    if not (rules.all_needed and rules.absent == "refuse" and state.members):
        return {}
    missing = {name: state.devices.get(name) for name in presence(rules, state, now).missing}
    return {
        name: _offline(rules)
        if device is not None and not device.online
        else (device.unfit if device is not None else "")
        or "it fits no tier any more: its hello names too little memory"
        for name, device in missing.items()
        if now >= grace_ends(rules, device, state.waiting_since)
    }


def find_lacking(rules: Rules, state: State, current: OpenRound, now: float) -> dict[str, str]:
    """Return the devices of the open round ``current`` that will send no update, with the reason of each, by name.

    Their update was refused, they declined, their task expired, the deadline passed, or they were offline for too
    long.
    """
    if not _may_lack(rules, state, current, now):
        return {}
    why = {name: _find_reason(rules, state, current, name, now) for name in current.assignments}
    return {name: reason for name, reason in why.items() if reason}


def _may_lack(rules: Rules, state: State, current: OpenRound, now: float) -> bool:
    """Return True if some device of the round may send no update, so that each has to be examined.

    That is so if a device was rejected, declined or expired, if the deadline has passed, or if a device is offline for
    too long.
    """
    ended = sum(current.count(status) for status in ("rejected", "declined", "expired"))
    if ended or now >= current.deadline:
        return True
    return any(until <= now for until in _away_until(rules, state, current))


def _away_until(rules: Rules, state: State, current: OpenRound) -> Iterator[float]:
    """Yield, for each offline device with an open task, the epoch second at which it has been offline for too long."""
    waited, away = current.assignments.open, state.devices.away
    for name in waited if len(waited) < len(away) else away:
        if name in waited and (until := away_until(rules, state, current, name)) is not None:
            yield until


def _find_reason(rules: Rules, state: State, current: OpenRound, name: str, now: float) -> str:
    assignment, until = current.assignments[name], away_until(rules, state, current, name)
    match assignment.status:
        case "rejected":
            return f"its update was refused{assignment.reason and f': {assignment.reason}'}"
        case "declined":
            return f"it declined ({assignment.reason})"
        case "expired":
            return "its task took too long, or it was away for too long"
        case "open" if now >= current.deadline:
            return "it did not report in time"
        case "open" if until is not None and now >= until:
            return _offline(rules)
    return ""


def find_unreported(rules: Rules, state: State, current: OpenRound, now: float) -> dict[str, str]:
    """Return all known devices with a tier that have no accepted update in the round, with the reason of each, by
    name.

    Unlike :func:`find_missing`, it includes devices that had no task.
    """
    elsewhere = {
        name: device.unfit or "it was not there"
        for name, device in sorted(state.devices.items())
        if device.tier
    }
    waited = {each.device: "it did not report in time" for each in current.with_status("open")}
    reasons = elsewhere | waited | find_lacking(rules, state, current, now)
    accepted = {assignment.device for assignment in current.with_status("accepted")}
    return {name: why for name, why in reasons.items() if name not in accepted}


def find_missing(rules: Rules, state: State, ended: OpenRound, now: float) -> dict[str, str]:
    """Return the devices with a task in the ended round but without an accepted update, with the reason of each, by
    name.

    In asynchronous rounds, open tasks continue in the next round, and their devices are not missing.
    """
    known = find_lacking(rules, state, ended, now)
    fine = ("accepted", "open") if ended.buffered else ("accepted",)
    return {
        name: known.get(name) or "the round had enough without it"
        for name, task in ended.assignments.items()
        if task.status not in fine
    }


def without_carry(current: OpenRound) -> tuple[str, ...]:
    """Return the names of the devices that declined because they lost the state that they keep from round to round."""
    return tuple(each.device for each in current.with_status("declined") if each.reason == NO_CARRY)


def all_refused(current: OpenRound, names: Collection[str]) -> bool:
    """Return True if each of the devices ``names`` declined its task, or sent an update that was refused."""
    return all(current.assignments[name].status in ("rejected", "declined") for name in names)


def given_up_at(rules: Rules, state: State, current: OpenRound) -> float | None:
    """Return the epoch second at which the round ends before its deadline because devices stay offline; None if it
    does not.

    A device's grace is the time that it may be offline. If all devices are needed, the round ends with the first grace
    that ends. Otherwise it ends when it has ``min_reports`` accepted updates and the grace of every device with an
    open task is over. While such a device is online, the result is None.
    """
    if current.whole:
        return min(_away_until(rules, state, current), default=None)
    if current.count("accepted") < max(1, rules.min_reports):
        return None
    last = 0.0
    for name in current.assignments.open:  # the first that is online ends the search
        until = away_until(rules, state, current, name)
        if until is None:
            return None
        last = max(last, until)
    return last


def away_until(rules: Rules, state: State, current: OpenRound, name: str) -> float | None:
    """Return the epoch second at which the grace of offline device ``name`` ends; None if it is online or unknown.

    The grace (the time that a device may be offline) begins with the round at the earliest, and moves with its
    deadline. So after a restart or an outage of the server, devices that were offline before have the whole grace to
    come back.
    """
    device = state.devices.get(name)
    if device is None or device.online:
        return None
    return grace_ends(rules, device, current.deadline - rules.deadline_s)


def grace_ends(rules: Rules, device: RosterEntry | None, since: float) -> float:
    """Return the epoch second at which ``device`` has been offline for ``rules.offline_grace_s``.

    The time counts from when the device was last seen, or from ``since`` if that is later. A ``device`` of None was
    never seen.
    """
    return max(since, device.seen if device is not None else since) + rules.offline_grace_s


def format_devices(reasons: Mapping[str, str]) -> str:
    """Return devices grouped by reason as text: ``strong-0, strong-1 (it declined (no-carry)), weak-1 (...)``.

    ``reasons`` is by device name. At most 20 devices are named, followed by the number of further devices.
    """
    devices: dict[str, list[str]] = {}
    for name, why in list(reasons.items())[:_MAX_NAMED]:
        devices.setdefault(why, []).append(name)
    more = len(reasons) - _MAX_NAMED
    return ", ".join(f"{', '.join(alike)} ({why})" for why, alike in devices.items()) + (
        f" and {more} more" if more > 0 else ""
    )


def _is_there(device: RosterEntry | None) -> bool:
    return device is not None and device.online and device.usable


def _offline(rules: Rules) -> str:
    return f"it has been offline for over {rules.offline_grace_s:g} s"
