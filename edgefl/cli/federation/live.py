"""Live view of a run: one row for each device, one line for each round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgefl.api.progress import opened_text, planned_rounds
from edgefl.cli.federation.lines import NO_STEP, RepeatedTexts
from edgefl.cli.output import console, errors
from edgefl.config import Federation
from edgefl.lab.lab import Restart, ServerEvent
from edgefl.system.sizes import KIB, MIB, size
from edgefl.wire.norm_statistics import NORMS
from edgefl.wire.text import device_result, headline_metric, round_result
from edgefl_export.compiler import cache

if TYPE_CHECKING:
    from edgefl.wire.update.form import UpdateSize


class RunView:
    """View of a run: the newest state of each device and round. Use it as a context.

    Args:
        federation: the federation.
        devices: names of the devices.
        updates: sizes of an update by tier.
        live: True draws a table on a terminal, and prints lines elsewhere. False leaves standard output to a
            program, and prints lines on standard error.
    """

    def __init__(
        self, federation: Federation, devices: list[str], updates: Mapping[str, UpdateSize], *, live: bool
    ) -> None:
        self._total = planned_rounds(federation)
        self._updates = updates
        self._coded = federation.codec.name != "dense"
        self._devices: dict[str, dict[str, Any]] = {
            name: {"tier": name.rpartition("-")[0]} for name in devices
        }
        self._rounds: list[dict[str, Any]] = []
        self._reports: dict[int, dict[str, dict[str, Any]]] = {}
        self._notes: list[str] = []
        self._stage = "starting: exporting and checking the graphs of each tier"
        self._said_stage = ""
        self._waits = False
        self._notes_said = 0
        self._final: dict[str, Any] = {}
        self._live = Live(console=console, refresh_per_second=4) if live and console.is_terminal else None
        self._repeats = None if self._live else RepeatedTexts()  # the live view shows the last rounds alone
        self._lines = None if self._live else console if live else errors

    def __enter__(self) -> RunView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(self._draw())
            self._live.stop()

    def take(self, item: ServerEvent | Restart) -> dict[str, Any] | None:
        """Add an event to the view and draw it.

        Return the round's figures by name if the event closed a round for the first time, else None.
        """
        closed = None
        if isinstance(item, Restart):
            self._notes.append(f"{item.name} was started again")
        else:
            closed = self._apply_event(item.event)
        if self._live:
            self._live.update(self._draw())
        elif self._lines:
            self._say_plainly(self._lines, closed)
        return closed

    def _say_plainly(self, lines: Console, closed: dict[str, Any] | None) -> None:
        """Print lines on ``lines`` instead of a table: stages of the start, each round, and the devices that a round
        waits for.

        ``closed``: figures of a round that has just closed, or None.
        """
        if closed is not None:
            lines.print(self._round_line(closed))
            return
        for note in self._notes[self._notes_said :]:
            lines.print(note, style="yellow")
        self._notes_said = len(self._notes)
        stage = self._stage if self._waits else self._stage.partition(": ")[0]  # a path may have a colon
        if (self._waits or not self._rounds) and stage != self._said_stage:
            lines.print(stage, style="dim")
            self._said_stage = stage

    def _apply_event(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Update the state of the view by an event of the server.

        Return the round's numbers by name if the event closed a round for the first time, else None.
        """
        self._waits = event.get("event") == "awaiting"
        match event.get("event"):
            case "deviceseen":
                self._devices.setdefault(event["device"], {}).update(_figures(event))
                if event["stage"] == "reported":
                    self._reports.setdefault(event["round"], {})[event["device"]] = _figures(event)
            case "started":
                self._total = event["rounds"]
            case "exporting":
                self._stage = f"exporting and checking {event['text']}"
            case "roundopened":
                self._stage = opened_text(event)
            case "waiting" | "awaiting":
                self._stage = _waits_for(event)
            case "offline" | "rejected" | "declined" | "devicelost" | "devicefailed":
                self._notes.append(_note(self._shorten(event)))
            case "refused":  # the server's last words say why
                self._stage = "the run ends unfinished"
            case "warned" | "noted" | "compiled" | "rolloutjudged":
                text = _note(event)
                if text not in self._notes:  # a server that was started again says it again
                    self._notes.append(text)
            case "finished":
                self._final = event
                self._stage = "done"
            case "roundclosed":
                row = {key: value for key, value in event.items() if key != "event"}
                row["devices"] = self._reports.pop(event["round"], {})
                repeat = any(earlier["round"] == row["round"] for earlier in self._rounds)
                if not repeat:  # a server that was killed may say it twice
                    self._rounds.append(row)
                    return row
        return None

    def _draw(self) -> Group:
        last = self._rounds[-1]["round"] if self._rounds else 0
        table = Table(title=f"round {last} of {self._total}", title_justify="left")
        for column in ("device", "tier", "round", "stage", "loss", "step", "peak", "down", "up"):
            table.add_column(column, justify="left" if column in ("device", "tier", "stage") else "right")
        for name, row in self._devices.items():
            table.add_row(name, *_cells(row))
        history = Text("\n".join(self._round_line(row) for row in self._rounds[-6:]))
        notes = Text("\n".join(self._notes[-3:]), style="yellow")
        return Group(table, history, notes, Text(self._stage, style="dim"))

    def _shorten(self, event: dict[str, Any]) -> dict[str, Any]:
        if self._repeats is None or not event.get("text") or "device" not in event:
            return event
        text = self._repeats.shorten(event["event"], event["device"], event["round"], event["text"])
        return {**event, "text": text}

    def _round_line(self, row: dict[str, Any]) -> str:
        text = row.get("text", "")
        if self._repeats is not None:
            text = self._repeats.shorten("roundclosed", "", row["round"], text)
        return _round_line(row, text, self._coded)

    def conclude(self, folder: Path) -> None:
        """Print the results of the run in ``folder``: final metric, warnings, bytes sent, path of the model, and next
        commands.
        """
        if score := headline_metric(self._final):
            console.print(f"final {score}", style="bold green")
        evaluations = [row["evaluation"] for row in self._rounds if row.get("evaluation")]
        if evaluations:
            console.print(device_result(evaluations[-1]), style="bold green")
        if caveat := self._final.get("text"):
            console.print(f"warning: {caveat}", style="yellow")
        for line in self._uplink():
            console.print(line)
        console.print(f"trained model   {self._final.get('model', folder / 'model.safetensors')}")
        # The last by name is the weakest of the usual tiers.
        bundles = sorted((folder / "bundles").glob("*.efl"))
        apart = (".evaluate", f".{NORMS}")
        for path in [path for path in bundles if not path.stem.endswith(apart)][-1:]:
            console.print(f"bundle          edgefl inspect {path}")
        console.print(f"logs            {folder}/logs")
        console.print(f"for inference   edgefl deploy --weights {folder} --out model.onnx")

    def _uplink(self) -> list[str]:
        """Return lines about the bytes of updates, headers included, and the share of moving statistics. Rounds
        without training are left out.
        """
        trained = [row for row in self._rounds if not (row.get("evaluation") or row.get("measures"))]
        rounds = len(trained)
        up = sum(row["up_bytes"] for row in trained)
        if not rounds or not up:
            return []
        saving = _smaller(up, sum(row["up_float32_bytes"] for row in trained)) if self._coded else ""
        tiers = [report["tier"] for row in trained for report in row["devices"].values()]
        statistics = sum(self._updates[tier].statistics_bytes for tier in tiers if tier in self._updates)
        lines = [f"uplink          {size(up / rounds)} per round{saving}"]
        if statistics:
            lines.append(f"  of it, moving statistics of norms: {size(statistics / rounds)} per round")
        return lines


_KEPT = (
    *("tier", "round", "stage", "step", "steps", "loss", "step_ms"),
    *("idle_bytes", "peak_bytes", "down_bytes", "up_bytes"),
)


def _figures(event: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in an event of the server by name.

    Zeros are left out, so that they do not erase earlier values.
    """
    return {key: event[key] for key in _KEPT if event.get(key) not in (None, 0, 0.0)}


def _note(event: dict[str, Any]) -> str:
    match event["event"]:
        case "compiled":
            counts = {key: event[key] for key in ("compiled", "reused")}
            return cache.cache_summary(**counts, folder=Path(event["cache"]), nbytes=event["cache_bytes"])
        case "declined" | "rejected":
            return _refusal(event)
        case "devicelost":
            waits = f"; round {event['round']} waits for it to come back" if event["round"] else ""
            return f"{event['device']} is gone: it was stopped or killed, or its link broke{waits}"
        case "rolloutjudged":
            what = "promoted" if event["promoted"] else "taken back"
            return f"after round {event['round']} the candidate is {what}: {event['text']}"
        case "devicefailed":
            return f"{event['device']} failed in round {event['round']} and tries again: {event['text']}"
    return str(event["text"])


def _refusal(event: dict[str, Any]) -> str:
    """Return a text about work that a device declined, or an update that was refused."""
    device, number, reason = event["device"], event["round"], event["reason"]
    what = f"declined round {number}" if event["event"] == "declined" else f"was refused in round {number}"
    head = f"{device} {what} ({reason})" if number else f"{device}, {reason}"
    return f"{head}: {event['text']}" if event["text"] else head


def _waits_for(event: dict[str, Any]) -> str:
    """Return a text about the devices or updates that the server waits for."""
    if event["event"] == "awaiting":
        devices = [
            f"{each['device']} ({'offline' if not each['online'] else each['stage'] or NO_STEP})"
            for each in event["devices"]
        ]
        return f"round {event['round']} waits for {', '.join(devices)}"
    whom = ", ".join(event.get("missing", ())) or "devices"
    return f"waiting for {whom}: {event['known']} of {event['needed']}"


def _cells(row: dict[str, Any]) -> list[str]:
    stage = row.get("stage", "")
    if stage.startswith(("train", "evaluate", "forward")) and row.get("steps"):
        stage = f"{stage} {row.get('step', 0)}/{row['steps']}"
    return [
        row.get("tier", ""),
        str(row.get("round", "")),
        stage,
        f"{row['loss']:.3f}" if row.get("loss") is not None else "",
        f"{row['step_ms']:.0f} ms" if row.get("step_ms") else "",
        f"{row['peak_bytes'] / MIB:.0f} MiB" if row.get("peak_bytes") else "",
        f"{row['down_bytes'] / KIB:.0f} KiB" if row.get("down_bytes") else "",
        f"{row['up_bytes'] / KIB:.0f} KiB" if row.get("up_bytes") else "",
    ]


def _round_line(row: dict[str, Any], text: str, coded: bool) -> str:
    found = row.get("evaluation")
    result = round_result(row) + ("" if found else f"  {row['reports']} reports")
    trains = not (found or row.get("measures"))
    smaller = _smaller(row["up_bytes"], row["up_float32_bytes"]) if coded and trains else ""
    return (
        f"round {row['round']:>3}  {result}  {row['seconds']:.1f} s  "
        f"down {size(row['down_bytes'])}  up {size(row['up_bytes'])}{smaller}  {text}"
    ).rstrip()


def _smaller(coded: int, float32: int) -> str:
    """Return a text such as `` (3.9x smaller than float32)``; "" if no update was sent. Arguments are bytes."""
    return f" ({float32 / coded:.1f}x smaller than float32)" if coded else ""
