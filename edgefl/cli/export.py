"""``edgefl export``: write the bundles that devices download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from edgefl.cli.output import errors, print_json, print_table, size

_EXAMPLES = """
Export each tier's bundle: its graphs, compiled with the training algorithm, and their manifest.

Every graph is run once in onnxruntime and compared with torch before its bundle is written.

Examples:

  edgefl export --model resnet20 --out bundles

  edgefl export federation.toml --tier weak --out bundles --json

  edgefl export --model resnet20 --memory-budget 64MiB      (recompute in the backward pass: less memory, more time)
"""


_GRAPHS = 4
"""Start, step, finish and evaluate; each chunk of the prefix has one more."""


def register(app: typer.Typer) -> None:
    app.command("export", help=_EXAMPLES)(export)


def export(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    out: Annotated[Path, typer.Option(help="folder for the bundles")] = Path("bundles"),
    model: Annotated[
        str | None, typer.Option(help="a model of `edgefl ls models`, or package.module:factory")
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="only this tier; may be repeated")] = None,
    memory_budget: Annotated[
        str, typer.Option(help="peak of a device in training over its idle process, like 64MiB or 60%")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list")] = False,
) -> None:
    from edgefl.config import load, without_devices
    from edgefl.lab.data import open_data
    from edgefl.lab.lab import completed
    from edgefl.submodels.output_side import OutputSide
    from edgefl.wire import bundle as bundles
    from edgefl.wire.errors import ConfigError
    from server import compose

    federation = completed(without_devices(load(config, {"model.name": model} if model else {})))
    unknown = sorted(set(tier or ()) - set(federation.tiers))
    if unknown:
        raise ConfigError(f"no tier {unknown[0]!r}; there are: {', '.join(federation.tiers)}")
    dataset = open_data(federation)
    spec = compose.build_model(federation, dataset)
    if memory_budget:
        tables = {
            name: table.model_copy(update={"memory_budget": memory_budget})
            for name, table in federation.tiers.items()
        }
        federation = federation.model_copy(update={"tiers": tables})
    chosen = {name: table for name, table in federation.tiers.items() if not tier or name in tier}
    submodels = {name: OutputSide(spec, table.cut, table.chunks) for name, table in chosen.items()}
    rows = []
    with Progress(console=errors, transient=True) as bar:
        graphs = bar.add_task(
            "", total=sum(len(submodel.groups) + _GRAPHS for submodel in submodels.values())
        )
        for name, submodel in submodels.items():
            made = compose.export(
                federation,
                dataset,
                submodel,
                name,
                lambda event: bar.update(graphs, advance=1, description=event.text),
            )
            bundles.write(made, out / f"{name}.efl")
            rows.append(
                {
                    "tier": name,
                    "file": str(out / f"{name}.efl"),
                    "bytes": (out / f"{name}.efl").stat().st_size,
                    "digest": made.ref(1 << 30).sha256,
                }
            )
    if as_json:
        print_json(rows)
    else:
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [row | {"bytes": size(row["bytes"])} for row in rows],
        )
