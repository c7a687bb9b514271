"""``edgefl cache``: the compiled bundles that are kept for the next run."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.output import console, print_json, print_table
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl_export.compiler.cache import BundleCache, CacheEntry


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
            text = f"removed {_counted(removed)}, {size(nbytes)}, from {short_path(kept.folder)}"
            console.print(text)
        return
    entries = kept.entries()
    if as_json:
        print_json(_as_object(kept, entries))
        return
    console.print(
        f"{short_path(kept.folder)}: {_counted(len(entries))}, {size(sum(each.nbytes for each in entries))} of at most "
        f"{size(kept.limit)}"
    )
    if entries:
        print_table("bundles", [_row(each) for each in entries])


def _as_object(kept: BundleCache, entries: list[CacheEntry]) -> dict[str, Any]:
    return {
        "folder": str(kept.folder),
        "bytes": sum(each.nbytes for each in entries),
        "limit": kept.limit,
        "bundles": [
            {"file": str(each.path), **_about(each), "bytes": each.nbytes, "used": _date(each).isoformat()}
            for each in entries
        ],
    }


def _row(entry: CacheEntry) -> dict[str, Any]:
    about = _about(entry)
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


def _about(entry: CacheEntry) -> dict[str, Any]:
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


def _counted(bundles: int) -> str:
    return f"{bundles} bundle{'' if bundles == 1 else 's'}"


def _date(entry: CacheEntry) -> datetime:
    return datetime.fromtimestamp(entry.used).astimezone()
