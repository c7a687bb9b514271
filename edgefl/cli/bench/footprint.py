"""``edgefl bench footprint``: what a waiting device holds in memory, how soon it is ready, what it takes on disk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import report
from edgefl.cli.output import errors, progress
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.bench.footprint.rows import FootprintRow


def footprint(
    repeat: Annotated[int, typer.Option(min=1, help="fresh processes of each kind")] = 5,
    python: Annotated[
        str, typer.Option(metavar="PYTHON", help="interpreter of a device's environment; default: this one")
    ] = "",
    flower: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            help="interpreter of an environment with flwr and torch; default: the one of `edgefl bench peer`",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """Measure an idle device and a Flower client with torch: memory, start time and installed size.

    Real processes on a real broker (Mosquitto where it is installed), one after the other: resident memory when connected
    and waiting, and seconds from the start of the process until the other side has heard of it. Installed is what the
    packages that it runs with take on disk as they were shipped, with all they require. The device of --engine executorch
    needs that package's libraries and nothing that it requires (pip install --no-deps executorch); --json has the size with
    all of it, too, and the bytecode that Python adds. Training is the peak of a round of ResNet-20's weak tier.

    The C++ agent has a row where there is one: EDGEFL_AGENT_CPP names it, or it lies in build/agents/cpp or in the path. Its
    size is the sum of the stripped binary and the libraries that it loads.

    Examples:

      edgefl bench footprint --json

      edgefl bench peer flower-torch

      edgefl bench footprint --python device/bin/python --repeat 10
    """

    from edgefl.bench.common.peers import interpreter, peers
    from edgefl.bench.footprint.rows import measure

    with progress() as tell:
        rows = measure(
            repeat,
            python or sys.executable,
            flower or interpreter(peers()["flower-torch"]) or "",
            tell,
        )
    for row in rows:
        if row.error:
            errors.print(f"{row.what}: {row.error}", style="yellow")
    report("footprint", "footprint: connected and idle", rows, _columns, as_json)
    if all(row.error for row in rows):
        raise typer.Exit(1)


def _columns(row: FootprintRow) -> dict[str, Any]:
    """``--json`` has more."""
    return {
        "what": row.what,
        "idle": "-" if row.idle_rss_bytes is None else size(row.idle_rss_bytes),
        "ready s": row.ready_s,
        "training": "-" if row.training_peak_bytes is None else size(row.training_peak_bytes),
        "installed": "-" if row.installed_bytes is None else size(row.installed_bytes),
        "packages": len(row.packages),
    }
