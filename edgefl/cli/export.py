"""``edgefl export``: write the bundles that devices download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.text import Text

from edgefl.cli.output import errors, print_json, print_table, size

_EXAMPLES = """
Export each tier's bundle: its graphs, compiled with the training algorithm, and their manifest.

Every graph is run once in onnxruntime and compared with torch before its bundle is written.

Examples:

  edgefl export --model resnet20 --out bundles

  edgefl export federation.toml --tier weak --out bundles --json

  edgefl export --model resnet20 --memory-budget 64MiB      (recompute in the backward pass: less memory, more time)

  edgefl export --model resnet18 --fit phone.toml      (what `edgefl plan --device phone.toml` recommends, as tier phone)
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
    fit: Annotated[
        Path | None,
        typer.Option(help="device file: export only the submodel that `edgefl plan` recommends for it"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list")] = False,
) -> None:
    if fit is not None:
        _export_fitting(config, out, model, tier, memory_budget, fit, as_json)
        return
    from edgefl.config import load, without_devices
    from edgefl.lab.data import open_data
    from edgefl.lab.lab import completed
    from edgefl.wire import bundle as bundles
    from edgefl.wire.errors import ConfigError
    from server import compose
    from server.bundles import bundle_name
    from server.bundles import export as export_tier
    from server.training import exchange_names, program_of

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
    submodels = {name: compose.submodel_of(spec, name, table) for name, table in chosen.items()}
    exchanges = exchange_names(program_of(federation, next(iter(submodels.values()))))
    rows = []
    with Progress(console=errors, transient=True) as bar:
        each = sum(len(submodel.prefix) + _GRAPHS for submodel in submodels.values())
        graphs = bar.add_task("", total=each * len(exchanges))
        for name, exchange in [(name, exchange) for name in submodels for exchange in exchanges]:
            made = export_tier(
                federation,
                dataset,
                submodels[name],
                name,
                lambda event: bar.update(graphs, advance=1, description=event.text),
                exchange=exchange,
            )
            path = out / bundle_name(name, exchange)
            bundles.write(made, path)
            rows.append(
                {
                    "tier": name,
                    **({"exchange": exchange or "main"} if len(exchanges) > 1 else {}),
                    "file": str(path),
                    "bytes": path.stat().st_size,
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


def _export_fitting(
    config: Path | None,
    out: Path,
    model: str | None,
    tier: list[str] | None,
    memory_budget: str,
    file: Path,
    as_json: bool,
) -> None:
    """One bundle: the recommended submodel for the device in ``file``, whose stem names the tier."""
    from edgefl.cli.fit import overrides, planned, read_device, suited
    from edgefl.config import TierTable, load, without_devices
    from edgefl.lab.data import open_data
    from edgefl.submodels.sizes import Size
    from edgefl.wire import bundle as bundles
    from edgefl.wire.errors import ConfigError
    from edgefl.wire.topics import checked_name
    from server import compose
    from server.bundles import export as export_tier

    if tier:
        raise ConfigError(f"--fit chooses the submodel for a device: leave out --tier {tier[0]}, or --fit")
    name, wishes = checked_name("tier", file.stem), read_device(file)
    named = {"model.name": model} if model else {}
    federation = without_devices(load(config, {**named, **overrides(wishes)}))
    dataset = open_data(federation)
    spec = compose.build_model(federation, dataset)
    with errors.status("") as status:
        made = planned(federation, spec, wishes, lambda text: status.update(Text(text)))
        best = made.recommended()
        submodel = Size(best.kind, best.options).of(spec)
        tables = {name: TierTable(memory_budget=memory_budget)}
        federation = suited(federation, submodel).model_copy(update={"tiers": tables})
        bundle = export_tier(
            federation, dataset, submodel, name, lambda event: status.update(Text(event.text))
        )
    path = out / f"{name}.efl"
    bundles.write(bundle, path)
    errors.print(f"chosen: {made.reason()}", markup=False, highlight=False, soft_wrap=True)
    row = {
        "tier": name,
        "file": str(path),
        "bytes": path.stat().st_size,
        "digest": bundle.ref(1 << 30).sha256,
        "kind": best.kind,
        "options": best.options,
        "program": bundle.manifest.program,
        "memory_bytes": best.memory_bytes,
        "reason": made.reason(),
    }
    if as_json:
        print_json([row])
    else:
        told = {key: row[key] for key in ("tier", "file", "digest", "kind")}
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [told | {"size": best.size, "memory": size(best.memory_bytes)}],
        )
