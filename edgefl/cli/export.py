"""``edgefl export``: write the bundles that devices download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.output import errors, mebibytes, print_json, print_table

_EXAMPLES = """
Export each tier's bundle: its graphs, compiled with the training algorithm, and their manifest.

Every graph is run once in onnxruntime and compared with torch before its bundle is written.

Examples:

  edgefl export --model resnet20 --out bundles

  edgefl export federation.toml --tier weak --out bundles --json
"""


def register(app: typer.Typer) -> None:
    app.command("export", help=_EXAMPLES)(export)


def export(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    out: Annotated[Path, typer.Option(help="folder for the bundles")] = Path("bundles"),
    model: Annotated[
        str | None, typer.Option(help="a model of `edgefl ls models`, or package.module:factory")
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="only this tier; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list")] = False,
) -> None:
    from edgefl.config import load
    from edgefl.lab.data import open_data
    from edgefl.lab.lab import completed
    from edgefl.submodels.output_side import OutputSide
    from edgefl.wire import bundle as bundles
    from edgefl.wire.errors import ConfigError
    from server import compose

    federation = completed(load(config, {"model.name": model} if model else {}))
    unknown = sorted(set(tier or ()) - set(federation.tiers))
    if unknown:
        raise ConfigError(f"no tier {unknown[0]!r}; there are: {', '.join(federation.tiers)}")
    dataset = open_data(federation)
    spec = compose.build_model(federation, dataset)
    rows = []
    with errors.status("exporting") as status:
        for name, table in federation.tiers.items():
            if tier and name not in tier:
                continue
            submodel = OutputSide(spec, table.cut, table.chunks)
            made = compose.export(
                federation, dataset, submodel, name, lambda event: status.update(event.text)
            )
            bundles.write(made, out / f"{name}.efl")
            size = (out / f"{name}.efl").stat().st_size
            rows.append(
                {
                    "tier": name,
                    "file": str(out / f"{name}.efl"),
                    "bytes": size,
                    "digest": made.ref(1 << 30).sha256,
                }
            )
    if as_json:
        print_json(rows)
    else:
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [row | {"bytes": mebibytes(row["bytes"])} for row in rows],
        )
