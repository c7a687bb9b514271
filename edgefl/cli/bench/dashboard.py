"""``edgefl bench dashboard``: what the fleet's page costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, report
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.bench.dashboard.rows import DashboardRow


def dashboard(
    devices: Annotated[list[int] | None, typer.Option(help="may be repeated; default: 1000")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are over")] = 100,
    seconds: Annotated[float, typer.Option(min=1.0, help="for which devices tell of their progress")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """Measure the first paint of the fleet's page, and the cost of updating it while all devices report their progress.

    The run is made up, through the server's own journal and feed; the page is served as by `edgefl dashboard` and looked at
    in headless Chromium. 1,000 devices and 100 rounds take some minutes to make up.

    Examples:

      edgefl bench dashboard --json

      edgefl bench dashboard --devices 100 --devices 1000 --rounds 20
    """

    from edgefl.bench.dashboard.rows import measure

    rows, failed = measured(
        devices or [1000],
        lambda count, tell: measure(devices=count, rounds=rounds, seconds=seconds, tell=tell),
        _line,
    )
    report("dashboard", "the fleet's page", rows, _columns, as_json, failed)


def _line(row: DashboardRow) -> str:
    return f"{row.devices} devices: first paint {row.first_paint_s:g} s, {row.cpu_share:.1%} of a core"


def _columns(row: DashboardRow) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "rounds": row.rounds,
        "ready s": row.ready_s,
        "first paint s": row.first_paint_s,
        "words/s": row.updates_per_s,
        "of a core": f"{row.cpu_share:.1%}",
        "browser": f"{row.browser_cpu_share:.1%}",
        "memory": size(row.rss_bytes),
    }
