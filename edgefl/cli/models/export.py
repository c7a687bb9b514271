"""``edgefl export``: write the bundles that devices download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text

from edgefl.cli.options import Engine
from edgefl.cli.output import errors, print_json, print_table
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.data.dataset import Dataset
    from edgefl.wire.bundle.archive import Bundle
    from exporters.front.tier import Exchange, Tier

_EXAMPLES = """
Export each tier's bundle: its graphs, compiled with the training algorithm, and their manifest.

Every graph is run once in the runtime of its format and compared with torch before its bundle is written.

Examples:

  edgefl export --model resnet20 --out bundles

  edgefl export federation.toml --tier weak --out bundles --json

  edgefl export --model resnet20 --format onnx --format executorch      (two bundles per tier; extra `executorch`)

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
    format: Annotated[
        list[Engine] | None,
        typer.Option(help="of the bundles; may be repeated; default: as the file says, or onnx"),
    ] = None,
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
        _export_fitting(config, out, model, tier, format, memory_budget, fit, as_json)
        return
    from edgefl.config import load, without_devices
    from edgefl.lab.lab import completed
    from edgefl.setup.data import open_data
    from edgefl.setup.model import federation_model
    from edgefl.setup.training import tiers_of
    from edgefl.wire.errors import ConfigError
    from exporters.bundle.formats import check_installed

    settings = load(config, {"model.name": model} if model else {})
    federation = completed(without_devices(settings))
    unknown = sorted(set(tier or ()) - set(federation.tiers))
    if unknown:
        raise ConfigError(f"no tier {unknown[0]!r}; there are: {', '.join(federation.tiers)}")
    chosen = {name: table for name, table in federation.tiers.items() if not tier or name in tier}
    formats = {name: _names(format) or settings.formats_of(name) for name in chosen}
    kinds = {each for wanted in formats.values() for each in wanted}
    check_installed(sorted(kinds))
    dataset = open_data(federation)
    if memory_budget:
        tables = {
            name: table.model_copy(update={"memory_budget": memory_budget})
            for name, table in federation.tiers.items()
        }
        federation = federation.model_copy(update={"tiers": tables})
    tiers = tiers_of(federation, federation_model(federation, dataset), list(chosen)).values()
    wanted = [(tier, each, form) for tier in tiers for each in tier.exchanges for form in formats[tier.name]]
    rows = []
    with Progress(console=errors, transient=True) as bar:
        graphs = bar.add_task("", total=sum(len(each.prefix) + _GRAPHS for each, *_ in wanted))

        def progress(text: str) -> None:
            bar.update(graphs, advance=1, description=text)

        for made, exchange, form in wanted:
            which = {"exchange": exchange.name or "main"} if len(made.exchanges) > 1 else {}
            which |= {"format": form} if len(kinds) > 1 else {}
            row, _ = _exported(federation, dataset, (made, exchange, form), out, progress)
            rows.append({"tier": made.name, **which, **row})
    _tell_cache(rows)
    if as_json:
        print_json(rows)
    else:
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [row | {"bytes": size(row["bytes"])} for row in rows],
        )


def _names(formats: list[Engine] | None) -> tuple[str, ...]:
    """As they were asked for, each once."""
    return tuple(dict.fromkeys(each.value for each in formats or ()))


def _exported(
    federation: Federation,
    dataset: Dataset,
    which: tuple[Tier, Exchange, str],
    out: Path,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], Bundle]:
    """Write one bundle, of a tier, exchange and format: what is told of it, and the bundle."""
    from edgefl.setup.bundles import bundle_of
    from edgefl.wire.bundle.archive import write_bundle
    from exporters.front.folder import bundle_name

    tier, exchange, form = which
    found = bundle_of(federation, dataset, tier, exchange, format=form, progress=progress)
    bundle, path = found.bundle, out / bundle_name(tier.name, exchange.name, form)
    write_bundle(bundle, path)
    facts = {"file": str(path), "bytes": path.stat().st_size, "digest": bundle.ref(1 << 30).sha256}
    return facts | {"compiled": found.compiled}, bundle


def _tell_cache(rows: list[dict[str, Any]]) -> None:
    from exporters.front.cache import BundleCache, told

    compiled, cache = sum(row["compiled"] for row in rows), BundleCache.of_user()
    text = told(compiled=compiled, reused=len(rows) - compiled, folder=cache.folder, nbytes=cache.nbytes)
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


def _export_fitting(
    config: Path | None,
    out: Path,
    model: str | None,
    tier: list[str] | None,
    formats: list[Engine] | None,
    memory_budget: str,
    file: Path,
    as_json: bool,
) -> None:
    """One bundle per format: the recommended submodel for the device in ``file``, whose stem names the tier."""
    from edgefl.cli.models.fit import overrides, planned, read_device, suited
    from edgefl.config import TierTable, load, without_devices
    from edgefl.setup.data import open_data
    from edgefl.setup.model import federation_model
    from edgefl.setup.training import program_of
    from edgefl.submodels.sizes import Size
    from edgefl.wire.errors import ConfigError
    from edgefl.wire.mqtt.topics import checked_name
    from exporters.bundle.formats import check_installed
    from exporters.front.tier import Tier

    if tier:
        raise ConfigError(f"--fit chooses the submodel for a device: leave out --tier {tier[0]}, or --fit")
    forms = _names(formats) or ("onnx",)
    check_installed(forms)
    name, wishes = checked_name("tier", file.stem), read_device(file)
    named = {"model.name": model} if model else {}
    federation = without_devices(load(config, {**named, **overrides(wishes)}))
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    with errors.status("") as status:
        made = planned(federation, spec, wishes, lambda text: status.update(Text(text)))
        best = made.recommended()
        submodel = Size(best.kind, best.options).of(spec)
        tables = {name: TierTable(memory_budget=memory_budget)}
        federation = suited(federation, submodel).model_copy(update={"tiers": tables})
        fitting = Tier(name, submodel, program_of(federation, submodel))
        rows = []
        for form in forms:
            row, bundle = _exported(
                federation,
                dataset,
                (fitting, fitting.main, form),
                out,
                lambda text: status.update(Text(text)),
            )
            rows.append({"tier": name, **({"format": form} if len(forms) > 1 else {}), **row})
    _tell_cache(rows)
    errors.print(f"chosen: {made.reason()}", markup=False, highlight=False, soft_wrap=True)
    facts = {
        "kind": best.kind,
        "options": best.options,
        "program": bundle.manifest.program,
        "memory_bytes": best.memory_bytes,
        "reason": made.reason(),
    }
    if as_json:
        print_json([row | facts for row in rows])
    else:
        shown = {"kind": best.kind, "size": best.size, "memory": size(best.memory_bytes)}
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [{key: value for key, value in row.items() if key != "bytes"} | shown for row in rows],
        )
