"""Events of the server as lines of text, with local times, sizes with units, and shortened digests."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from edgefl.system.clock import clock
from edgefl.system.sizes import size
from edgefl.wire.mqtt.neighbours import list_devices
from edgefl.wire.text import MEASURED, count_text, device_result, headline_metric
from edgefl_export.compiler import cache
from edgefl_server import events

_DIGITS = 12
NO_STEP = "online, no step reported yet"
"""A device that fetches, loads and prepares: it reports steps alone."""


def line(event: events.Event, now: float, repeats: RepeatedTexts | None = None) -> str | None:
    """Return an event of the server as a line such as ``10:07:31  round 3 opened ...``, or None for an event that is not
    logged.

    Args:
        event: the event.
        now: time of the line, seconds since the epoch.
        repeats: memory of earlier texts, which are shortened; None to print all in full.
    """
    if repeats is not None:
        event = _shorten(event, repeats)
    text = text_of(event)
    return None if text is None else f"{clock(now)}  {text}"


def _shorten(event: events.Event, repeats: RepeatedTexts) -> events.Event:
    match event:
        case events.Rejected() | events.ParticipationDeclined() | events.DeviceFailed():
            short = repeats.shorten(type(event).__name__, event.device, event.round, event.text)
            return msgspec.structs.replace(event, text=short)
        case events.RoundEnded():
            return msgspec.structs.replace(
                event, text=repeats.shorten(event.outcome, "", event.round, event.text)
            )
    return event


def text_of(event: events.Event) -> str | None:  # noqa: PLR0911 - a case for each event
    """Return an event of the server as a sentence, or None for an event that is shown only in a table."""
    match event:
        case events.Started():
            over = event.next_round > event.rounds
            again = "has trained all rounds" if over else f"goes on with round {event.next_round}"
            begins = again if event.resumed else "begins"
            key = f", signs with the key {event.server_key}" if event.server_key else ""
            return (
                f"federation {event.federation!r} {begins}: run {event.run}, {count_text(event.rounds, 'round')}, model "
                f"{event.model_version[:_DIGITS]}, updates are summed on {event.device}{key}"
            )
        case events.Exporting():
            return f"exporting tier {event.tier}: {event.text}"
        case events.Compiled():
            folder, counts = Path(event.cache), {"compiled": event.compiled, "reused": event.reused}
            return cache.cache_summary(**counts, folder=folder, nbytes=event.cache_bytes)
        case events.Warned():
            return f"warning: {event.text}"
        case events.Noted():
            return event.text
        case events.Waiting():
            whom = f", missing {list_devices(event.missing)}" if event.missing else ""
            why = f" ({event.reason})" if event.reason else ""
            return f"round {event.next_round} waits for devices: {event.known} of {event.needed} are there{whom}{why}"
        case events.Offline():
            return f"offline: {event.text}; trying again in {event.retry_s:.1f} s"
        case events.Online():
            return f"online: connected to the broker at {event.broker}"
        case events.DeviceJoined():
            return f"{event.device} is there, as tier {event.tier}"
        case events.DeviceLost():
            back = (
                f"; round {event.round} gives it until {clock(event.until)} to come back"
                if event.round
                else ""
            )
            return f"{event.device} is gone: it was stopped or killed, or its link broke{back}"
        case events.DeviceFitness():
            if event.unfit:
                return f"{event.device} is left out of rounds for now: {event.unfit}"
            return f"{event.device} may be selected again"
        case events.RolloutStarted():
            whom = ", ".join(f"{count} of tier {tier}" for tier, count in event.devices.items())
            return f"round {event.round} begins the trial of the candidate: {whom} try it"
        case events.RolloutJudged():
            what = "promoted: all its devices train with it from now on" if event.promoted else "taken back"
            return f"after round {event.round} the candidate is {what} ({event.text})"
        case events.DeviceFailed():
            return f"{event.device} failed in round {event.round} and tries again: {event.text}"
        case events.Awaiting():
            devices = ", ".join(map(device_text, event.devices)) or "devices that are ready"
            return f"round {event.round} waits until {clock(event.until)} for {devices}"
        case events.RoundOpened():
            devices = count_text(len(event.devices), "device")
            purpose = " to evaluate the model" if event.evaluates else ""
            purpose = " to measure the statistics of batch norm" if event.measures else purpose
            until = clock(event.deadline)
            return f"round {event.round} opened for {devices}{purpose} until {until}: {list_devices(event.devices)}"
        case events.DeviceSeen():
            if event.stage != events.REPORTED:
                return None
            parts = [f"loss {event.loss:.4g}"] if math.isfinite(event.loss) else []  # an evaluation has none
            parts += (
                [f"step {event.step_ms:.0f} ms"] if event.step_ms else []
            )  # devices that do not measure say 0
            parts += [f"peak {size(event.peak_bytes)}"] if event.peak_bytes else []
            parts += [f"down {size(event.down_bytes)}"] if event.down_bytes else []
            parts.append(f"up {size(event.up_bytes)}")
            parts += [f"{graph} as {form}" for graph, form in event.variants.items() if form]
            parts += [f"{form} cannot run there ({why})" for form, why in event.dropped.items()]
            return f"{event.device} reported for round {event.round}: {', '.join(parts)}"
        case events.Rejected():
            if not event.round:  # of its hello, or of a message that cannot be read
                return f"{event.device}, {event.reason}: {event.text}"
            return f"{event.device} was refused in round {event.round} ({event.reason}): {event.text}"
        case events.ParticipationDeclined():
            return f"{event.device} declined round {event.round} ({event.reason}): {event.text}".removesuffix(
                ": "
            )
        case events.Limited():
            counted = ", ".join(f"{why} ({count})" for why, count in sorted(event.counts.items()))
            return f"turned away unread so far: {counted}"
        case events.Ordered():
            fate = "is carried out" if event.done else "is refused"
            return f"the order {event.order!r} of {event.by or 'somebody'} {fate}: {event.text}".removesuffix(
                ": "
            )
        case events.Refused():
            return f"the run ends unfinished: {event.text}"
        case events.RoundEnded():
            missing = ", ".join(f"{name} ({why})" for name, why in event.missing.items())
            tail = f": {event.text}" if event.text else f", without {missing}" if missing else ""
            reports = count_text(event.reports, "report" if event.evaluates else "update")
            return f"round {event.round} {event.outcome} after {event.seconds:.1f} s with {reports}{tail}"
        case events.RolledBack():
            return None  # the round's end says the same
        case events.RoundClosed():
            if event.evaluation is not None:
                result = device_result(msgspec.to_builtins(event.evaluation))
                return (
                    f"round {event.round} {result}, down {size(event.down_bytes)}, up {size(event.up_bytes)}"
                )
            if event.statistics is not None:
                shown = event.statistics.devices
                rows = count_text(shown.rows, "row") if shown else "too few devices to be shown"
                return f"round {event.round} summed up {rows}, up {size(event.up_bytes)}"
            if event.measures:
                return f"round {event.round} {MEASURED}, up {size(event.up_bytes)}"
            scores = _scores(event)
            if event.outcome != "closed" and not scores:
                return None  # its end said all there is
            failed = f": {event.text}" if event.outcome == "closed" and event.text else ""
            return (
                f"round {event.round} {'evaluated' if scores else 'not evaluated'}{scores}, down {size(event.down_bytes)}, "
                f"up {size(event.up_bytes)}, weights {event.weights_sha256[:_DIGITS]}{failed}"
            )
        case events.Stopped():
            over = event.next_round > event.rounds
            return (
                f"stopped; the same command {'ends it' if over else f'goes on with round {event.next_round}'}"
            )
        case events.Finished():
            rounds = count_text(event.rounds, "round")
            caveat = f"; warning: {event.text}" if event.text else ""
            model = f", model {event.model} ({event.weights_sha256[:_DIGITS]})" if event.model else ""
            return f"finished {rounds}{_scores(event)}{model}{caveat}"
    return None


def device_text(device: events.AwaitedDevice) -> str:
    """Return the name of a device with its last report in this round, such as ``weak-1 (train 3/10 at 10:07:31)``."""
    if not device.online:
        return f"{device.device} (offline since {clock(device.since)})"
    return (
        f"{device.device} ({device.stage} at {clock(device.since)})"
        if device.stage
        else f"{device.device} ({NO_STEP})"
    )


def _scores(event: events.RoundClosed | events.Finished) -> str:
    fields = {"metric": event.metric, "metrics": event.metrics, "accuracy": event.accuracy}
    score = headline_metric(fields)
    return (f", {score}" if score else "") + ("" if event.loss is None else f", loss {event.loss:.4g}")


class RepeatedTexts:
    """Memory of printed texts by kind of event and device. It shortens texts that are repeated in later rounds."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[str, int]] = {}

    def shorten(self, kind: str, device: str, number: int, text: str) -> str:
        """Return ``text`` if it is new, or ``as in round N`` if the last text was equal, printed in full in round N.

        Args:
            kind: name of the event.
            device: device of the event, "" for a whole round.
            number: round of the event; 0 for none, which is never shortened.
            text: text of the event. Its own round number does not count as a difference.
        """
        if not number or not text:
            return text
        plain = text.replace(f"round {number} ", "", 1)
        last, first = self._last.get((kind, device), ("", number))
        if last != plain:
            self._last[kind, device] = plain, number
            return text
        return text if first == number else f"as in round {first}"
