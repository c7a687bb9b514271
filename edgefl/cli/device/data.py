"""``edgefl data check`` and ``edgefl data spread``: check a device's data, show how samples are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.options import Seed, add_group, writable_file
from edgefl.cli.output import console, human, print_json, print_table
from edgefl.errors import DataError
from edgefl.system.files import write_text

if TYPE_CHECKING:
    from edgefl_device.data.check import DataReport


def register(app: typer.Typer) -> None:
    add_group(app, "data", "Data: a device's own, and how a federation's are spread.", check, spread)


def check(
    data: Annotated[Path, typer.Argument(help="what `edgefl device --data` takes: a file or a folder")],
    bundle: Annotated[Path, typer.Option(help="the bundle of a tier, as `edgefl export` writes it")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Check whether local data fit a bundle.

    Prints what was found in the data, and each row that does not fit.

    Exit code 0 if all rows fit, 3 if one does not or the data cannot be used. Needs no torch and no broker.

    Examples:

      edgefl data check photos --bundle strong.efl

      edgefl data check sensors.csv --bundle weak.efl --json
    """

    import msgspec

    from edgefl.api.check_data import check_data

    report = check_data(data, bundle)
    if as_json:
        print_json({"fits": report.fits, **msgspec.structs.asdict(report)})
    else:
        _show(report)
    if not report.fits:
        raise typer.Exit(DataError.exit_code)


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


_SHOWN = 20


def spread(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML); default: the demo's")
    ] = None,
    devices: Annotated[int, typer.Option(min=0, help="0: as many as the tiers have")] = 0,
    seed: Seed = None,
    data: Annotated[Path | None, typer.Option(help="folder with the dataset's standard files")] = None,
    svg: Annotated[Path | None, typer.Option(callback=writable_file, help="write a picture here")] = None,
    as_csv: Annotated[
        Path | None,
        typer.Option("--csv", callback=writable_file, help="write a table here, a row for each device"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show how samples are spread over the devices.

    How many each device has, of which classes, and how unlike the devices are.

    Nothing is trained. The same file and seed give the same spread in `edgefl run`.

    Examples:

      edgefl data spread federation.toml

      edgefl data spread federation.toml --devices 100 --svg spread.svg --csv spread.csv

      edgefl data spread --devices 20 --seed 3 --json
    """

    import msgspec

    from edgefl.config.reading import check_names

    check_names(config, {"data.dir": str(data)} if data else {})  # torch, loaded below, takes seconds
    from edgefl.analysis.spread import picture, table
    from edgefl.api.spread import spread as spread_of

    found = spread_of(config, devices=devices, seed=seed, data=data)
    if svg is not None:
        write_text(svg, picture(found))
    if as_csv is not None:
        write_text(as_csv, table(found))
    if as_json:
        print_json(msgspec.structs.asdict(found) | {"size_deviation": found.size_deviation})
        return
    rows = []
    for device, samples in enumerate(found.samples[:_SHOWN]):
        row = {"device": str(device), "samples": human(samples)}
        if found.counts:
            held = zip(found.classes, found.counts[device], strict=True)
            row["classes"] = ", ".join(f"{name}: {human(count)}" for name, count in held if count)
        if found.owners:
            row["owners"] = human(found.owners[device])
        rows.append(row)
    print_table(f"{found.dataset}, partition {found.partition}, seed {found.seed}", rows)
    if len(found.samples) > _SHOWN:
        console.print(f"... and {human(len(found.samples) - _SHOWN)} devices more; --json has them all")
    summary = (
        f"samples of a device: {human(found.fewest)} to {human(found.most)}, median {found.middle:g}, "
        f"deviation over mean {found.size_deviation:.2f}"
    )
    if found.counts:
        few, many = min(found.classes_held), max(found.classes_held)
        summary += (
            f"; classes: {few} to {many}; total variation from the mean {found.distance_to_mean:.2f}, "
            f"between devices {found.distance_between:.2f}"
        )
    console.print(summary)
    for what, path in (("picture", svg), ("table", as_csv)):
        if path is not None:
            console.print(f"{what}: {path}")
