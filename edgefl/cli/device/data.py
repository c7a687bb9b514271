"""``edgefl data check``: whether a device's data fit a bundle. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.analysis import spread
from edgefl.cli.output import console, human, print_json, print_table
from edgefl.wire.errors import DataError

if TYPE_CHECKING:
    from device_runtime.data.check import DataReport


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Data: a device's own, and how a federation's are spread.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    group.callback()(lambda: None)
    group.command("check")(check)
    group.command("spread")(spread.spread)
    app.add_typer(group, name="data")


def check(
    data: Annotated[Path, typer.Argument(help="what `edgefl device --data` takes: a file or a folder")],
    bundle: Annotated[Path, typer.Option("--for", help="the bundle of a tier, as `edgefl export` writes it")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Say whether local data fit a bundle: what was found, and what does not fit, row by row.

    Exit code 0 where all rows fit, 3 where one does not or the data cannot be used. Needs no torch and no broker.

    Examples:

      edgefl data check photos --for strong.efl

      edgefl data check sensors.csv --for weak.efl --json
    """

    from edgefl.api.check_data import check_data

    report = check_data(data, bundle)
    if as_json:
        print_json({"fits": report.fits, **_fields(report)})
    else:
        _show(report)
    if not report.fits:
        raise typer.Exit(DataError.exit_code)


def _fields(report: DataReport) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(report)


def _show(report: DataReport) -> None:
    if report.inputs:
        print_table(
            f"{report.source}: {human(report.rows)} rows",
            [
                {
                    "input": each.name,
                    "dtype": each.dtype,
                    "shape": " x ".join(map(str, each.shape)) or "one number",
                    "from": each.least,
                    "to": each.most,
                }
                for each in report.inputs
            ],
        )
    if report.classes:
        print_table("Classes", [{"class": name, "rows": count} for name, count in report.classes.items()])
    if report.problems:
        print_table(
            ("1 row does not fit" if report.bad_rows == 1 else f"{human(report.bad_rows)} rows do not fit")
            + (f", the first {len(report.problems)}" if len(report.problems) < report.bad_rows else ""),
            [{"where": each.where, "what": each.text} for each in report.problems],
        )
    if report.unread:
        console.print(f"the model does not read: {', '.join(report.unread)}")
    verdict = (
        "every row fits"
        if report.fits
        else report.error or "the other rows fit: --bad-rows skip leaves these out"
    )
    console.print(verdict)
