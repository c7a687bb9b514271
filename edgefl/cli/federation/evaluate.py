"""``edgefl evaluate``: the model of a finished run, measured on the rows that its devices hold out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.options import existing
from edgefl.cli.output import console, print_json, print_table
from edgefl.wire.text import metric_value

if TYPE_CHECKING:
    from edgefl_server.events import DeviceEvaluation, GroupResult


def evaluate(
    folder: Annotated[
        Path, typer.Argument(callback=existing, help="folder of the run: --out of `edgefl run`")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Evaluate the model of a finished run on its devices.

    Each device measures the model of its tier on the rows that it holds out (`split` in the table evaluate of the
    federation file) and reports sums. The run's broker, server and devices are started again for one evaluation round.

    For a server and devices elsewhere: `edgefl server --evaluate`, with the options of the run.

    Examples:

      edgefl evaluate runs/first

      edgefl evaluate runs/first --json
    """
    import msgspec

    from edgefl.api.run import evaluate as evaluate_run

    found = evaluate_run(folder)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    print_table(
        f"after {found.trained_rounds} training rounds, on held-out rows of the devices", list(_rows(found))
    )
    for tier in found.left_out:
        console.print(f"tier {tier}: fewer devices than evaluate.least_group, so its result is not shown")


def _rows(found: DeviceEvaluation) -> Iterator[dict[str, object]]:
    """Yield a table row with the metrics of all devices, then one for each tier."""
    groups: dict[str, GroupResult] = {"all": found.devices} if found.devices is not None else {}
    for tier, group in {**groups, **found.tiers}.items():
        row: dict[str, object] = {"tier": tier, "devices": group.devices}
        for name in group.metrics:
            row[name] = metric_value(name, group.metrics[name])
            if name == found.metric:
                row["median"] = metric_value(name, group.median[name]) if name in group.median else ""
                row["worst decile"] = (
                    metric_value(name, group.worst_decile[name]) if name in group.worst_decile else ""
                )
        yield row
