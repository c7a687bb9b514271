"""``edgefl ls``, ``edgefl inspect``, ``edgefl validate`` and ``edgefl cache``: show catalogs, bundles, files and the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from edgefl.cli.output import console, errors, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.system.sizes import size
from edgefl.wire.text import suggest

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle
    from edgefl.config import Federation
    from edgefl.wire.bundle.manifest import Manifest
    from edgefl.wire.update.form import UpdateSize
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgefl_export.compiler.cache import BundleCache, CacheEntry

BrokerProfile = StrEnum("BrokerProfile", ["aws"])
Catalog = StrEnum(
    "Catalog",
    ["models", "losses", "kinds", "submodels", "algorithms", "optimizers", "codecs", "combinations"],
)


_MARKS = {"scalars": "scalar of the task", "server_options": "of the server"}
CAPTION = (
    "exchanges: of a round, and those that come once, before all. gradients: of a local step; full: a pass over all local "
    "samples. up/down/kept: floats for each parameter, per device and round; kept is what a device stores until the next. "
    "all: every device has to take part. Options and more: edgefl ls algorithms NAME. Each also takes personal=ALPHA."
)


def ls(
    what: Annotated[
        Catalog,
        typer.Argument(help="what to list; kinds: of submodels, submodels: each model's preset tiers"),
    ],
    name: Annotated[str | None, typer.Argument(help="everything about one of them")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list")] = False,
) -> None:
    """List what edgefl knows.

    Examples:

      edgefl ls models

      edgefl ls losses

      edgefl ls kinds

      edgefl ls codecs

      edgefl ls algorithms

      edgefl ls algorithms fafed      (with its options)

      edgefl ls submodels --json

    Combinations:

      edgefl ls combinations tcbgd      (what goes with an algorithm or codec)
    """

    from edgefl.facts import shipped

    rows = shipped().rows[what.value]
    if what is Catalog.combinations:
        _combinations(rows, name, as_json)
        return
    if name is not None:
        about = _one(rows, name, what.value)
        rows = [row for row in rows if row.get("name") == name]
    if as_json:
        print_json(rows)
        return
    if name is not None:
        print_table(name, about)
        return
    caption = ""
    if what is Catalog.algorithms:
        rows, caption = algorithm_table(rows), CAPTION
    print_table(what.value, [row | _with_defaults(row.get("options")) for row in rows], caption)


def _combinations(rows: list[dict[str, Any]], name: str | None, as_json: bool) -> None:
    """Print the combinations of all algorithms and codecs, or of the one called ``name``, as a list or with ``as_json``
    as JSON.
    """
    from edgefl.facts.combinations import table

    if name is not None:
        known = list(dict.fromkeys(str(row["name"]) for row in rows))
        rows = [row for row in rows if row["name"] == name]
        if not rows:
            raise _unknown_name("combinations", name, known)
    if as_json:
        print_json(rows)
        return
    for cells in table() if name is None else ():
        (what, names), *others = cells.items()
        console.print(f"[bold]{what}[/] {names}", markup=True)
        console.print("; ".join(f"{column}: {cell}" for column, cell in others if cell), style="dim")
    for row in rows if name is not None else ():
        lines = [{"goes with": key, "": value} for key, value in row.items() if key not in ("what", "name")]
        print_table(f"{row['what']} {row['name']}", lines)


def _unknown_name(what: str, name: str, known: Collection[str]) -> ConfigError:
    there = f"there are: {', '.join(known)}{suggest(name, known)}"
    return ConfigError(f"`edgefl ls {what}` has no {name!r}; {there}", name=name)


def _with_defaults(options: Any) -> dict[str, list[str]]:
    """Return a table row with the key ``options``: texts NAME=DEFAULT of options that have defaults. Return {} without
    options.
    """
    if not isinstance(options, dict):
        return {}
    return {"options": [f"{name}={msgspec.json.encode(value).decode()}" for name, value in options.items()]}


def algorithm_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of algorithms with columns that fit a terminal, without options (:func:`_one` prints these)."""
    return [
        {
            "name": row["name"],
            "what": row["what"].partition(":")[0].removesuffix("."),
            "exchanges": f"{row['exchanges']}{' + 1 once' if row['opening'] else ''}",
            "gradients": " + ".join([str(row["gradients"]), *(["full"] if row["full"] else [])]),
            "up/down/kept": "/".join(f"{row[key]:.3g}" for key in ("up", "down", "kept")),
            "all": row["everyone"],
        }
        for row in rows
    ]


def _one(rows: list[dict[str, Any]], name: str, what: str) -> list[dict[str, Any]]:
    """Return all facts and options of the row called ``name`` as table rows with the columns ``key`` and ``value``.

    Args:
        rows: all rows of the catalog.
        name: name to find.
        what: name of the catalog, for the error.

    Raises:
        ConfigError: if no row has that name.
    """
    known = {str(row["name"]): row for row in rows if "name" in row}
    if name not in known:
        raise _unknown_name(what, name, known)
    row = {key: value for key, value in known[name].items() if key not in ("options", *_MARKS)}
    options = known[name].get("options") or {}
    lines = [{"key": key, "value": value} for key, value in row.items()]
    if isinstance(options, dict):
        return lines + [
            {"key": f"option {key}{_mark(key, known[name])}", "value": value}
            for key, value in options.items()
        ]
    return [*lines, {"key": "options", "value": options}]


def _mark(option: str, row: dict[str, Any]) -> str:
    """Return a text that names the functions of an algorithm that ``option`` affects; "" if the row is not an algorithm."""
    if "scalars" not in row:
        return ""
    return next((f", {text}" for key, text in _MARKS.items() if option in row[key]), ", compiled in")


def inspect(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="bundle file (.efl)")],
    as_json: Annotated[bool, typer.Option("--json", help="the whole manifest as JSON")] = False,
) -> None:
    """Show what is in a bundle.

    It shows graphs, ports, sizes, and how a device runs it. Every digest is checked.

    Examples:

      edgefl inspect bundles/weak.efl

      edgefl inspect bundles/weak.efl --json
    """

    from edgefl.api.bundle import Bundle

    bundle = Bundle.load(path)
    if as_json:
        print_json({"digest": bundle.digest, "manifest": bundle.manifest})
    else:
        _show(bundle)


def _show(bundle: Bundle) -> None:
    manifest = bundle.manifest
    console.print(f"{manifest.model} · tier {manifest.tier} · algorithm {manifest.program}")
    console.print(f"digest      {bundle.digest}")
    console.print(f"parameters  {manifest.parameters:,} trained")
    console.print(
        f"sample      {manifest.data.dtype} {list(manifest.data.shape)}, {manifest.data.classes} classes"
    )
    for number, chunk in enumerate(manifest.prefix, 1):
        console.print(f"forward {number}   {', '.join(chunk.units)}")
    phases = ", ".join(f"{phase.steps} x {phase.name}" for phase in manifest.phases)
    console.print(f"train       {', '.join(manifest.suffix)} ({phases}, batch {manifest.batch})")
    console.print(f"update      {_update(manifest)}")
    rows = [
        {
            "graph": graph.name,
            "format": graph.format,
            "size": size(graph.blob.size),
            "inputs": _ports(graph.inputs),
            "outputs": _ports(graph.outputs),
        }
        for graph in manifest.graphs
    ]
    print_table("graphs", rows)


def _update(manifest: Manifest) -> str:
    """Return a line about an update: the codec, its tensors or encoded arrays, and their size."""
    ports = manifest.graph(manifest.finish).outputs_of("update")
    arrays = [f"{port.label} {math.prod(port.shape):,} x {port.dtype}" for port in ports]
    contents = f"{len(ports)} tensors" if manifest.codec == "dense" else ", ".join(arrays)
    total = size(sum(port.nbytes for port in ports))
    return f"codec {manifest.codec}, version {manifest.codec_version}: {contents}; {total}"


def _ports(ports: Any) -> str:
    counts: dict[str, int] = {}
    for port in ports:
        counts[port.role] = counts.get(port.role, 0) + 1
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def validate(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="federation file (TOML)")] = None,
    template: Annotated[
        bool, typer.Option(help="print a file with every key, its default and its meaning")
    ] = False,
    build: Annotated[
        bool,
        typer.Option("--build", help="build the model and its tiers too: fit, warnings, sizes of updates"),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="the complete configuration as JSON; with --build, sizes as `updates`"),
    ] = False,
    broker_profile: Annotated[
        BrokerProfile | None,
        typer.Option(help="what a hosted broker would not take; with --build, of the announcement too"),
    ] = None,
) -> None:
    """Check a federation file and list every problem in it.

    Keys, values, names, options and their types, and cuts are checked.

    With --build the data are opened and the model is built, cut and given its algorithm, too. That takes seconds, finds what
    does not fit together, warns of tiers that would not learn, and prints the size of an update of each tier in bytes.

    Examples:

      edgefl validate federation.toml

      edgefl validate federation.toml --build

      edgefl validate federation.toml --broker-profile aws

      edgefl validate --template > federation.toml
    """

    from edgefl.config import checked
    from edgefl.config.text import document

    if template:
        typer.echo(document(), nl=False)
        return
    if path is None:
        raise typer.BadParameter("give a federation file, or --template")
    loaded = checked(path)
    updates, traffic = _build_model(loaded) if build else ({}, None)
    if broker_profile is not None:
        _refuse_what_breaks(loaded, broker_profile.value, traffic)
    rows = as_rows(updates)
    if as_json:
        print_json(loaded.model_dump() | ({"updates": rows} if build else {}))
        return
    tiers = ", ".join(updates or loaded.tiers) or "of the model"
    typer.echo(f"{path} is valid: {loaded.federation.name}, {loaded.model.name}, tiers {tiers}")
    if build:
        print_table(f"updates, codec {loaded.codec.name}", for_people(rows))
    else:
        typer.echo(
            "the model was not built; --build builds it, reports sizes and checks that all tables agree"
        )


def _refuse_what_breaks(federation: Federation, profile: str, traffic: tuple[int, int] | None) -> None:
    """Raise ConfigError with every limit of the hosted broker ``profile`` that the federation exceeds.

    ``traffic``: (bytes of a round's announcement, number of its messages); None if unknown.
    """
    from edgefl_server.access.limits import HOSTED, TrafficEstimate, find_exceeded_limits

    hosted = HOSTED[profile]
    found = list(
        find_exceeded_limits(
            hosted,
            federation=federation.federation.name,
            limits=federation.wire_limits,
            address=federation.broker.address(),
            traffic=TrafficEstimate(*traffic) if traffic else None,
        )
    )
    if found:
        listed = "\n".join(f"  {each}" for each in found)
        raise ConfigError(f"{hosted.name} ({hosted.source}) would not take this federation:\n{listed}")


def _build_model(federation: Federation) -> tuple[dict[str, UpdateSize], tuple[int, int]]:
    """Build the model and its tiers, and print warnings to standard error.

    Returns:
        (size of an update by tier, (bytes of a round's announcement, number of its messages)).

    Raises:
        ConfigError: if the model does not fit the data, or cannot be trained as the tiers say.
        ModelError: if the model cannot be built or cut.
    """
    from edgefl.setup.data import open_data
    from edgefl.setup.model import federation_model, submodel_of, submodel_warnings
    from edgefl.setup.tiers import completed
    from edgefl.setup.training import announcement, tier_sizes

    spec = federation_model(federation, open_data(federation))
    initial = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    tiers = federation.tiers or completed(federation).tiers
    submodels = {tier: submodel_of(spec, tier, table) for tier, table in tiers.items()}
    for tier, submodel in submodels.items():
        for text in submodel_warnings(submodel, tier, initial):
            errors.print(f"warning: {text}")
    return tier_sizes(federation, spec, submodels), announcement(federation, spec, tiers)


def as_rows(updates: Mapping[str, UpdateSize]) -> list[dict[str, Any]]:
    """Return the sizes of updates as table rows: one for each part of a tier's update, and one for its total.

    The total includes names, shapes and padding. Sizes are in bytes, ``ratio`` is relative to float32.
    """
    rows: list[dict[str, Any]] = []
    for tier, update in updates.items():
        for part in update.parts:
            rows.append(
                {
                    "tier": tier,
                    "part": "statistics" if part.statistics else "trained",
                    "tensors": part.tensors,
                    "entries": part.entries,
                    "bits": part.bits,
                    "scales": part.scales,
                    "bytes": part.nbytes,
                    "ratio": 4 * part.entries / part.nbytes if part.nbytes else 1.0,
                }
            )
        entries = sum(part.entries for part in update.parts)
        rows.append(
            {
                "tier": tier,
                "part": "whole",
                "tensors": sum(part.tensors for part in update.parts),
                "entries": entries,
                "bits": 8 * update.nbytes / entries if entries else 0.0,
                "scales": sum(part.scales for part in update.parts),
                "bytes": update.nbytes,
                "ratio": update.ratio,
            }
        )
    return rows


def for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of :func:`as_rows` for a terminal: sizes with units instead of bytes."""
    lines = [
        {**row, "bits": round(row["bits"], 2), "size": size(row["bytes"]), "smaller": f"{row['ratio']:.1f}x"}
        for row in rows
    ]
    return [{key: value for key, value in row.items() if key not in ("bytes", "ratio")} for row in lines]


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="remove all of them")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """List the compiled bundles that are kept, or remove them.

    A bundle is compiled once for the same model, tier, algorithm, codec, samples, versions and source of edgefl; after that
    `edgefl run`, `server`, `export` and `profile` take it from here. What was longest not used goes when the folder grows
    beyond its limit. The environment variable EDGEFL_CACHE names another folder.

    Examples:

      edgefl cache

      edgefl cache --clear

      edgefl cache --json
    """

    from edgefl_export.compiler.cache import BundleCache, short_path

    kept = BundleCache.of_user()
    if clear:
        nbytes = kept.nbytes
        removed = kept.clear()
        if as_json:
            print_json({"folder": str(kept.folder), "removed": removed, "bytes": nbytes})
        else:
            text = f"removed {_count_text(removed)}, {size(nbytes)}, from {short_path(kept.folder)}"
            console.print(text)
        return
    entries = kept.entries()
    if as_json:
        print_json(_cache_object(kept, entries))
        return
    console.print(
        f"{short_path(kept.folder)}: {_count_text(len(entries))}, {size(sum(each.nbytes for each in entries))} of at most "
        f"{size(kept.limit)}"
    )
    if entries:
        print_table("bundles", [_cache_row(each) for each in entries])


def _cache_object(kept: BundleCache, entries: list[CacheEntry]) -> dict[str, Any]:
    return {
        "folder": str(kept.folder),
        "bytes": sum(each.nbytes for each in entries),
        "limit": kept.limit,
        "bundles": [
            {
                "file": str(each.path),
                **_entry_facts(each),
                "bytes": each.nbytes,
                "used": _date(each).isoformat(),
            }
            for each in entries
        ],
    }


def _cache_row(entry: CacheEntry) -> dict[str, Any]:
    about = _entry_facts(entry)
    if not about["whole"]:
        return {"model": "damaged", "tier": "", "algorithm": "", "format": ""} | _last(entry)
    tier = f"{about['tier']} ({about['exchange']})" if about["exchange"] else about["tier"]
    return {
        "model": about["model"],
        "tier": tier,
        "algorithm": about["algorithm"],
        "format": about["format"],
        **_last(entry),
    }


def _last(entry: CacheEntry) -> dict[str, str]:
    return {"size": size(entry.nbytes), "last used": _date(entry).strftime("%Y-%m-%d %H:%M")}


def _entry_facts(entry: CacheEntry) -> dict[str, Any]:
    manifest = entry.manifest
    if manifest is None:
        return {"whole": False}
    return {
        "whole": True,
        "model": manifest.model,
        "tier": manifest.tier,
        "exchange": manifest.exchange,
        "algorithm": manifest.program,
        "format": manifest.format,
    }


def _count_text(bundles: int) -> str:
    return f"{bundles} bundle{'' if bundles == 1 else 's'}"


def _date(entry: CacheEntry) -> datetime:
    return datetime.fromtimestamp(entry.used).astimezone()
