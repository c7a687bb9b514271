"""Changes of a fleet's state by the events of its server. Applying an event twice changes nothing more."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import singledispatch
from statistics import median

import msgspec

from edgefl.wire.text import count_text, device_result
from edgefl_server import events
from edgefl_server.dashboard.state.fleet import (
    MOST_PARTS,
    MOST_VITALS,
    DeviceRound,
    Fleet,
    RoundRecord,
    TierTotals,
    VitalSample,
    keep,
)

_FIELDS = {"accepted": "arrived", "rejected": "rejected", "declined": "declined", "missing": "missing"}


def sums_of(round_: RoundRecord) -> dict[str, TierTotals]:
    """Return the totals of a round by tier, sorted by tier.

    They are computed from the states of its devices, or are the stored totals if these states were dropped.
    """
    if not round_.parts:
        return round_.sums
    by_tier: dict[str, list[DeviceRound]] = {}
    for part in round_.parts.values():
        by_tier.setdefault(part.tier, []).append(part)
    return {tier: sum_parts(by_tier[tier]) for tier in sorted(by_tier)}


def sum_parts(parts: Iterable[DeviceRound]) -> TierTotals:
    """Return the totals over ``parts``, the states of devices of one tier in a round."""
    made = TierTotals()
    arrived: list[DeviceRound] = []
    for part in parts:
        made.selected += 1
        made.staleness = max(made.staleness, part.staleness)
        if part.status in _FIELDS:
            name = _FIELDS[part.status]
            setattr(made, name, getattr(made, name) + 1)
        if part.reason:
            made.reasons[part.reason] = made.reasons.get(part.reason, 0) + 1
        if part.status == "accepted":
            arrived.append(part)
    made.down_bytes = sum(part.down_bytes for part in arrived)
    made.up_bytes = sum(part.up_bytes for part in arrived)
    made.seconds = _median(part.seconds for part in arrived)
    made.step_ms = _median(part.step_ms or None for part in arrived)
    made.used_bytes = int(_median(part.used_bytes or None for part in arrived) or 0)
    return made


def total(sums: Iterable[TierTotals]) -> TierTotals:
    """Return the sums over all tiers: counts and bytes only, because medians of tiers cannot be combined.

    ``staleness`` is the largest of any tier.
    """
    made = TierTotals()
    for each in sums:
        for name in ("selected", "arrived", "rejected", "declined", "missing", "down_bytes", "up_bytes"):
            setattr(made, name, getattr(made, name) + getattr(each, name))
        made.staleness = max(made.staleness, each.staleness)
        for reason, count in each.reasons.items():
            made.reasons[reason] = made.reasons.get(reason, 0) + count
    return made


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


_MOST_SHOWN = 5
_ENDED = ("closed", "abandoned", "undone")


def apply(fleet: Fleet, at: float, event: events.Event) -> None:
    """Update ``fleet`` by an event of its server. ``at`` is the time of the event in epoch seconds."""
    fleet.told = max(fleet.told, at)
    take(event, fleet, at)


@singledispatch
def take(event: events.Event, fleet: Fleet, at: float) -> None:
    """Update ``fleet`` by an event of the epoch second ``at``. The type of the event selects the implementation.

    Events of other types change nothing.
    """


# -- the server ----------------------------------------------------------------------------------------------


@take.register
def _(event: events.Started, fleet: Fleet, at: float) -> None:
    if fleet.run and fleet.run != event.run:
        fleet.clear()
    fleet.federation, fleet.run, fleet.total = event.federation, event.run, event.rounds
    fleet.next_round, fleet.model_version = event.next_round, event.model_version
    fleet.processor, fleet.offline, fleet.text = event.device, False, ""
    going_on = fleet.rounds.get(event.next_round)
    fleet.phase = "open" if going_on is not None and going_on.state == "open" else "waiting"
    again = f"goes on with round {event.next_round}" if event.resumed else "begins"
    fleet.entry(at, "server", f"the server {again}: run {event.run}, {event.rounds} rounds")


@take.register
def _(event: events.Exporting, fleet: Fleet, at: float) -> None:
    fleet.text = f"exporting tier {event.tier}: {event.text}"


@take.register
def _(event: events.Compiled, fleet: Fleet, at: float) -> None:
    fleet.text = ""
    fleet.entry(at, "server", f"bundles: {event.compiled} compiled, {event.reused} reused")


@take.register
def _(event: events.Warned, fleet: Fleet, at: float) -> None:
    fleet.entry(at, "warning", event.text)


@take.register
def _(event: events.Noted, fleet: Fleet, at: float) -> None:
    fleet.entry(at, "note", event.text)


@take.register
def _(event: events.Offline, fleet: Fleet, at: float) -> None:
    fleet.offline = True
    fleet.entry(at, "broker", event.text)


@take.register
def _(event: events.Online, fleet: Fleet, at: float) -> None:
    fleet.offline, fleet.broker = False, event.broker
    fleet.entry(at, "broker", f"connected to {event.broker}")


@take.register
def _(event: events.Limited, fleet: Fleet, at: float) -> None:
    fleet.turned_away = dict(event.counts)


@take.register
def _(event: events.Vitals, fleet: Fleet, at: float) -> None:
    last = fleet.vitals[-1] if fleet.vitals else None
    share = 0.0
    if last is not None and at > last.at and event.cpu_s >= last.cpu_s:  # else the server was started again
        share = (event.cpu_s - last.cpu_s) / (at - last.at)
    fleet.count += 1
    vital = VitalSample(
        n=fleet.count,
        at=at,
        inbox=event.inbox,
        server_lag_s=event.server_lag_s,
        broker_lag_s=event.broker_lag_s,
        cpu_s=event.cpu_s,
        cpu_share=share,
        rss_bytes=event.rss_bytes,
    )
    keep(fleet.vitals, vital, MOST_VITALS)


@take.register
def _(event: events.Ordered, fleet: Fleet, at: float) -> None:
    if event.done and event.order in ("pause", "resume"):
        fleet.paused = event.order == "pause"
    if event.done and event.order == "rollback":
        for row in fleet.rounds.values():
            if row.number > event.version and row.state == "closed":
                row.state, row.changed = "undone", fleet.tick
    outcome = "" if event.done else " was refused"
    fleet.entry(
        at, "order", f"{event.order} by {event.by}{outcome}" + (f": {event.text}" if event.text else "")
    )


@take.register
def _(event: events.Refused, fleet: Fleet, at: float) -> None:
    fleet.phase, fleet.text = "refused", event.text
    fleet.entry(at, "server", f"the run ends unfinished: {event.text}")


@take.register
def _(event: events.Stopped, fleet: Fleet, at: float) -> None:
    fleet.phase, fleet.next_round = "stopped", event.next_round
    fleet.entry(at, "server", f"stopped; round {event.next_round} is next")


@take.register
def _(event: events.Finished, fleet: Fleet, at: float) -> None:
    fleet.phase, fleet.text = "done", ""
    fleet.entry(at, "server", f"finished after {event.rounds} rounds")


@take.register
def _(event: events.Waiting, fleet: Fleet, at: float) -> None:
    fleet.phase, fleet.next_round = "waiting", event.next_round
    fleet.text = f"waits for devices: {event.known} of {event.needed}{_among(event.missing)}"


# -- rounds --------------------------------------------------------------------------------------------------


@take.register
def _(event: events.RoundOpened, fleet: Fleet, at: float) -> None:
    opened = fleet.round(event.round)
    opened.state, opened.opened, opened.deadline, opened.goal = "open", at, event.deadline, event.goal
    opened.evaluates, opened.measures = event.evaluates, event.measures
    fleet.phase, fleet.current, fleet.text = "open", event.round, ""
    for name in event.devices:
        device = fleet.device(name)
        if _going_on(fleet, name) is None:
            fleet.part(event.round, name)
        device.round, device.stage, device.step, device.steps, device.loss = event.round, "", 0, 0, None
    purpose = ", which evaluate the model" if event.evaluates else ""
    purpose = ", which measure the statistics of batch norm" if event.measures else purpose
    text = f"round {event.round} opened for {len(event.devices)} devices{purpose}"
    fleet.entry(at, "round", text, number=event.round)
    _forget(fleet)


@take.register
def _(event: events.Awaiting, fleet: Fleet, at: float) -> None:
    fleet.text = f"round {event.round} waits for {len(event.devices)} devices"
    for each in event.devices:
        if (device := fleet.devices.get(each.device)) is not None and device.online != each.online:
            fleet.device(each.device).online = each.online


@take.register
def _(event: events.RoundEnded, fleet: Fleet, at: float) -> None:
    ended = fleet.round(event.round)
    ended.state, ended.seconds, ended.text = event.outcome, event.seconds, event.text
    ended.reports = event.reports
    ended.opened = ended.opened or at - event.seconds
    for name, why in event.missing.items():
        part = _part_of(fleet, event.round, name)
        fleet.devices[name].missed += part.status == "open"
        if part.status in ("open", "missing"):
            part.status, part.reason = "missing", why
    fleet.phase, fleet.next_round, fleet.text = "waiting", event.round + 1, ""
    reports = count_text(event.reports, "report" if event.evaluates else "update")
    text = f"round {event.round} {event.outcome} with {reports}"
    fleet.entry(at, "round", text + (f": {event.text}" if event.text else ""), number=event.round)


@take.register
def _(event: events.RolledBack, fleet: Fleet, at: float) -> None:
    fleet.entry(at, "round", event.text, number=event.round)


@take.register
def _(event: events.RoundClosed, fleet: Fleet, at: float) -> None:
    record_result(fleet, event)
    if event.evaluation is not None:
        result = device_result(msgspec.to_builtins(event.evaluation))
        fleet.entry(at, "round", f"round {event.round} {result}", number=event.round)
    if event.metrics:
        score = event.metrics.get(event.metric, event.loss)
        result = "" if score is None else f": {event.metric} {score:.4g}"
        fleet.entry(at, "round", f"round {event.round} evaluated{result}", number=event.round)


def record_result(fleet: Fleet, event: events.RoundClosed) -> None:
    """Store the results of a closed round in ``fleet``, from an event of the feed or of the history file."""
    row = fleet.round(event.round)
    if row.state not in _ENDED:
        row.state = event.outcome
    for name in (
        "accuracy",
        "loss",
        "train_loss",
        "metric",
        "metrics",
        "seconds",
        "reports",
        "weights_sha256",
        "evaluation",
    ):
        setattr(row, name, getattr(event, name))
    row.measures = event.measures or row.measures
    row.evaluates = event.evaluation is not None or row.measures or row.evaluates
    row.down_bytes, row.up_bytes = event.down_bytes, event.up_bytes
    row.server_down_bytes, row.text = event.server_down_bytes, event.text or row.text


# -- devices -------------------------------------------------------------------------------------------------


@take.register
def _(event: events.DeviceJoined, fleet: Fleet, at: float) -> None:
    device = fleet.device(event.device, event.tier)
    device.online, device.seen = True, at
    fleet.entry(at, "device", f"is there, as tier {event.tier}", device=event.device)


@take.register
def _(event: events.DeviceLost, fleet: Fleet, at: float) -> None:
    device = fleet.device(event.device, event.tier)
    device.online, device.seen = False, at
    fleet.entry(at, "device", "is gone", device=event.device, number=event.round)


@take.register
def _(event: events.DeviceFitness, fleet: Fleet, at: float) -> None:
    fleet.device(event.device, event.tier)
    text = f"is left out of rounds for now: {event.unfit}" if event.unfit else "may be selected again"
    fleet.entry(at, "device", text, device=event.device)


@take.register
def _(event: events.RolloutStarted, fleet: Fleet, at: float) -> None:
    whom = ", ".join(f"{count} of tier {tier}" for tier, count in event.devices.items())
    text = f"round {event.round} begins the trial of the candidate: {whom} try it"
    fleet.entry(at, "trial", text, number=event.round)


@take.register
def _(event: events.RolloutJudged, fleet: Fleet, at: float) -> None:
    what = "promoted" if event.promoted else "taken back"
    text = f"after round {event.round} the candidate is {what} ({event.text})"
    fleet.entry(at, "trial", text, number=event.round)


@take.register
def _(event: events.DeviceFailed, fleet: Fleet, at: float) -> None:
    fleet.device(event.device).stage = "failed"
    fleet.entry(at, "failure", event.text, device=event.device, number=event.round)


@take.register
def _(event: events.DeviceSeen, fleet: Fleet, at: float) -> None:
    device = fleet.device(event.device, event.tier)
    if at >= device.seen:
        device.online, device.seen = True, at
    device.round, device.stage = event.round, event.stage
    device.loss = event.loss if math.isfinite(event.loss) else device.loss
    device.step_ms = event.step_ms or device.step_ms
    if event.stage != events.REPORTED:
        device.step, device.steps = event.step, event.steps
        if (row := fleet.rounds.get(event.round)) is not None and event.device in row.parts:
            _store_measurements(fleet.part(event.round, event.device), event)
        return
    device.dropped = event.dropped
    part = fleet.part(event.round, event.device, event.tier)
    _mark_accepted(fleet, part, at)
    _store_measurements(part, event)
    part.loss = event.loss if math.isfinite(event.loss) else None
    part.down_bytes, part.up_bytes = event.down_bytes, event.up_bytes
    part.forward_ms = event.forward_ms


@take.register
def _(event: events.UpdateAccepted, fleet: Fleet, at: float) -> None:
    part = fleet.part(event.round, event.device, event.tier)
    part.weight = event.weight
    _mark_accepted(fleet, part, at)


@take.register
def _(event: events.Rejected, fleet: Fleet, at: float) -> None:
    text = f"refused ({event.reason}): {event.text}"
    fleet.entry(at, "refused", text, device=event.device, number=event.round)
    row = fleet.rounds.get(event.round)
    if row is None:
        return
    part = row.parts.get(event.device)
    if part is not None and part.status == "open":
        part.status, part.reason = "rejected", event.reason
    elif row.state in _ENDED:
        row.late = {**row.late, event.reason: row.late.get(event.reason, 0) + 1}
        if part is not None and part.status == "missing":
            part.staleness = max(1, fleet.next_round - event.round)
    row.changed = fleet.tick


@take.register
def _(event: events.ParticipationDeclined, fleet: Fleet, at: float) -> None:
    part = fleet.part(event.round, event.device)
    if part.status == "open":
        part.status, part.reason = "declined", event.reason
    detail = f": {event.text}" if event.text else ""
    fleet.entry(at, "declined", f"declined ({event.reason}){detail}", device=event.device, number=event.round)


def _part_of(fleet: Fleet, number: int, name: str) -> DeviceRound:
    """Return the state of device ``name`` in the earlier round on which it still works, else in round ``number``."""
    earlier = _going_on(fleet, name)
    return fleet.part(number if earlier is None else earlier.round, name)


def _going_on(fleet: Fleet, name: str) -> DeviceRound | None:
    """Return the state of device ``name`` in an earlier round whose task is still open (asynchronous runs).

    Return None if the device has no open task from an earlier round.
    """
    device = fleet.devices.get(name)
    part = device.at_work if device is not None else None
    return part if part is not None and fleet.rounds[part.round].state in _ENDED else None


def _mark_accepted(fleet: Fleet, part: DeviceRound, at: float) -> None:
    if part.status != "accepted":
        part.status, part.reason = "accepted", ""
        fleet.devices[part.device].reports += 1
    opened = fleet.rounds[part.round].opened
    if part.seconds is None and opened:
        part.seconds = max(0.0, at - opened)
        part.staleness = max(0, fleet.current - part.round)


def _store_measurements(part: DeviceRound, event: events.DeviceSeen) -> None:
    part.steps = event.steps or part.steps
    part.step_ms = event.step_ms or part.step_ms
    part.peak_bytes = max(part.peak_bytes, event.peak_bytes)
    part.idle_bytes = event.idle_bytes or part.idle_bytes


def _forget(fleet: Fleet) -> None:
    """Replace the device states of the oldest rounds by totals until at most :data:`MOST_PARTS` states are stored."""
    for number in sorted(fleet.rounds) if fleet.kept > MOST_PARTS else ():
        old: RoundRecord = fleet.rounds[number]
        if fleet.kept <= MOST_PARTS or number >= fleet.current:
            return
        old.sums = sums_of(old)
        fleet.kept -= len(old.parts)
        for name in old.parts:
            fleet.devices[name].parts.pop(number, None)
        old.parts = {}


def _among(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    more = len(names) - _MOST_SHOWN
    return f", missing {shown}" + (f" and {more} more" if more > 0 else "") if names else ""
