"""``edgefl bench fleet`` and ``edgefl bench coordinator``: what many devices cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, mebibytes, print_rows, report

if TYPE_CHECKING:
    from edgefl.bench.fleet.rows import FleetRow

_Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]
_Share = Annotated[float, typer.Option(min=0, max=1, help="share of the tasks, as in `edgefl load`")]


def fleet(
    devices: Annotated[int, typer.Option(min=0, help="connections; 0: the rows above")] = 0,
    selected: Annotated[int, typer.Option(min=0, help="devices of a round; 0: all")] = 0,
    update: Annotated[str, typer.Option(help="dense, onebit, middle or small")] = "dense",
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are counted")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="processes that take updates in")] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="seconds after which a round closes")] = 120.0,
    fetch: Annotated[bool, typer.Option("--fetch", help="devices fetch bundle and weights too")] = False,
    train: Annotated[float, typer.Option(min=0, help="seconds from a task to its update")] = 0.0,
    progress_rate: Annotated[
        float, typer.Option("--progress", min=0, max=5, help="messages a second while they train")
    ] = 0.0,
    vanish: _Share = 0.0,
    late: _Share = 0.0,
    duplicate: _Share = 0.0,
    garbage: _Share = 0.0,
    away: Annotated[float, typer.Option(min=0, help="seconds until one that vanished is back")] = 30.0,
    keep: Annotated[Path | None, typer.Option(help="folder for what server and broker leave behind")] = None,
    as_json: _Json = False,
) -> None:
    """Rounds of many devices that are connected at once: their time, and what server and broker take for them.

    Mosquitto runs with the configuration that edgefl ships, the server is `edgefl server`, and all devices are connections
    of one process that trains nothing (`edgefl load`): broker, server and generator share this machine. Updates are dense (a
    ResNet-20, 1.1 MB), onebit (the same in one bit an entry), middle (321 KB) or small (3 KB). The first round is not
    counted, and three more are not where few of the devices are selected: the others listen until they rest.

    Without --devices the rows are: 1,000 devices with dense and with onebit updates; 100 of 100 and 100 of 10,000 selected;
    3,000 with 321 KB. That takes some minutes.

    Examples:

      edgefl bench fleet --json

      edgefl bench fleet --devices 300 --update onebit --rounds 3

      edgefl bench fleet --devices 10000 --selected 100 --update onebit --json
    """

    from edgefl.bench.fleet.rows import Case, measure
    from edgefl.lab.generator.settings import Shares

    common: dict[str, Any] = {
        "rounds": rounds,
        "workers": workers,
        "deadline_s": deadline,
        "fetch": fetch,
        "train_s": train,
        "progress_s": progress_rate,
        "away_s": away,
        "shares": Shares(vanish, late, duplicate, garbage),
    }
    wanted = [(devices, selected, update)] if devices else _CASES
    cases = [Case(*each, **common) for each in wanted]
    rows, failed = measured(cases, lambda case, tell: measure(case, tell, keep), _line)
    report("fleet", "rounds of a fleet", rows, _columns, as_json, failed)


_CASES = (
    (1000, 0, "dense"),
    (1000, 0, "onebit"),
    (100, 100, "onebit"),
    (10_000, 100, "onebit"),
    (3000, 0, "middle"),
)
"""Devices, selected, updates."""


def coordinator(
    assignments: Annotated[
        list[int] | None, typer.Option(min=1, help="may be repeated; default: 100, 1000 and 10000")
    ] = None,
    events: Annotated[int, typer.Option(min=1, help="of each kind that are timed, at most")] = 500,
    as_json: _Json = False,
) -> None:
    """Time of the coordinator's step for one event, while a round with so many assignments is open.

    Events are the answers of devices, hellos and statuses as the server takes them in between two of its ticks, and ticks.
    No broker and no process of its own is involved.

    Example:

      edgefl bench coordinator --json
    """

    from edgefl.bench.coordinator import measure

    print_rows("coordinator", measure(assignments or [100, 1000, 10_000], events), as_json)


def _line(row: FleetRow) -> str:
    return (
        f"{row.devices:,} devices, {row.selected:,} selected, {row.update}: {row.round_p50_s:.2f} s a round, server "
        f"{row.server_cpu_s_per_1000:.2f} s per 1,000 updates, {mebibytes(row.server_peak_bytes)} MiB"
    )


def _columns(row: FleetRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "devices": row.devices,
        "selected": row.selected,
        "update": row.update,
        "connect s": row.connect_s,
        "round s": row.round_p50_s,
        "cycle s": row.cycle_p50_s,
        "CPU s/1000": row.server_cpu_s_per_1000,
        "MiB": mebibytes(row.server_peak_bytes),
        "ack p99 s": row.ack_p99_s,
        "resent": f"{row.resent_share:.1%}",
        "dropped": row.dropped_messages,
    }
