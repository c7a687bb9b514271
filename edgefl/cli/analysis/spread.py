"""``edgefl data spread``: how the samples of a federation are spread over its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.output import console, human, print_json, print_table
from edgefl.system.files import write_text

_SHOWN = 20


def spread(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML); default: the demo's")
    ] = None,
    devices: Annotated[int, typer.Option(min=0, help="0: as many as the tiers have")] = 0,
    seed: Annotated[int | None, typer.Option(help="in place of the federation's")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the dataset's standard files")] = None,
    svg: Annotated[Path | None, typer.Option(help="write a picture here")] = None,
    as_csv: Annotated[
        Path | None, typer.Option("--csv", help="write a table here, a row for each device")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show how a federation's samples are spread over its devices: how many each has, of which classes, and how unlike they
    are.

    Nothing is trained. The same file and seed give the same spread in `edgefl run`.

    Examples:

      edgefl data spread federation.toml

      edgefl data spread federation.toml --devices 100 --svg spread.svg --csv spread.csv

      edgefl data spread --devices 20 --seed 3 --json
    """

    import msgspec

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
    console.print(summary, soft_wrap=True)
    for what, path in (("picture", svg), ("table", as_csv)):
        if path is not None:
            console.print(f"{what}: {path}", soft_wrap=True)
