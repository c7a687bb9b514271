"""``edgefl statistics``: counts and moments of the devices' data, without training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli import options
from edgefl.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from edgefl_server.events import DataStatistics, GroupStatistics


def statistics(
    config: Annotated[Path, typer.Argument(callback=options.existing, help="federation file (TOML)")],
    out: Annotated[
        Path | None,
        typer.Option(
            callback=options.writable_folder,
            help="folder of the round, with the devices of one machine; default: a temporary one",
        ),
    ] = None,
    ask: Annotated[
        str,
        typer.Option(
            help="statistics, separated by commas: classes, moments, missing, histogram, lengths; default: all that the "
            "data have"
        ),
    ] = "",
    edges: Annotated[
        str, typer.Option(help="edges of a histogram's bins, as a model reads the values: 0,0.25,0.5,0.75,1")
    ] = "",
    devices: Annotated[
        int,
        typer.Option(
            min=0,
            help="devices to wait for; default: round.min_devices if that is above 1, else all that connect within 10 s",
        ),
    ] = 0,
    broker: options.Broker = "",
    ca_file: options.CaFile = "",
    password_file: options.PasswordFile = "",
    sign_key: Annotated[
        Path | None, typer.Option(help="file with the server's key; default: this user's for the federation")
    ] = None,
    enrolled: Annotated[
        Path | None, typer.Option(help="list of the devices that may join (`edgefl enroll`)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Ask devices for statistics of their data, without training.

    Each device passes once over its rows and reports integer sums. With --broker a server asks the devices of a fleet and
    ends after one round; without it, the federation's devices are started on this machine.

    A device's owner can refuse (`statistics = false` in its policy). Results of fewer devices than
    `evaluate.least_group` are not shown.

    Examples:

      edgefl statistics federation.toml --broker localhost:1883

      edgefl statistics federation.toml --ask classes,moments --json

      edgefl statistics federation.toml --edges 0,0.25,0.5,0.75,1 --out runs/statistics
    """
    import msgspec

    from edgefl.api.statistics import statistics as ask_devices
    from edgefl.config import load
    from edgefl.errors import ConfigError

    try:
        bins = tuple(float(edge) for edge in edges.split(",") if edge.strip())
    except ValueError as error:
        raise ConfigError(f"--edges should be numbers separated by commas, found {edges!r}") from error
    files = {"broker.ca_file": ca_file, "broker.password_file": password_file}
    given: dict[str, object] = {key: file for key, file in files.items() if file}
    if (password := os.environ.get("EDGEFL_BROKER_PASSWORD", "")) and not password_file:
        given["broker.password"] = password
    federation = load(config, given)
    found = ask_devices(
        federation,
        out or "",
        ask=tuple(name.strip() for name in ask.split(",") if name.strip()),  # type: ignore[misc]
        edges=bins,
        devices=devices,
        broker=broker,
        sign_key=sign_key,
        enrolled=enrolled,
        watch=(lambda _: None) if as_json else None,
    )
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    _print(found)
    if found.normalization is not None:
        console.print("to mean 0 and deviation 1:", highlight=False)
        for line in found.normalization.lines:
            console.print(line, markup=False, highlight=False)


def _print(found: DataStatistics) -> None:
    """Print the tables of all devices, the rows of the tiers, and the tiers that are left out."""
    everyone = found.devices
    groups = {"all": everyone} if everyone is not None else {}
    rows = [
        {"tier": tier, "devices": each.devices, "rows": each.rows}
        for tier, each in {**groups, **found.tiers}.items()
    ]
    if rows:
        print_table("devices and their rows", rows)
    if everyone is not None:
        if found.announced_rows > everyone.rows:
            console.print(
                f"{found.announced_rows - everyone.rows} announced rows were left out by the devices"
            )
        if everyone.classes:
            counts = zip(found.class_names, everyone.classes, strict=False)
            print_table("labels by class", [{"class": name, "labels": count} for name, count in counts])
        if values := list(_values(found, everyone)):
            print_table(f"values by {found.kind}", values)
        if everyone.lengths:
            print_table("tokens of a text", [_length_row(everyone.lengths)])
    for tier in found.left_out:
        console.print(f"tier {tier}: fewer devices than evaluate.least_group, so its result is not shown")


def _values(found: DataStatistics, everyone: GroupStatistics) -> Iterator[dict[str, object]]:
    """Yield a table row for each channel, feature or other group of values, with count, mean, deviation and histogram."""
    bins = [f"[{low:g}, {high:g})" for low, high in zip(found.edges, found.edges[1:], strict=False)]
    if bins:
        bins = [f"< {found.edges[0]:g}", *bins[:-1], f"{bins[-1][:-1]}]", f"> {found.edges[-1]:g}"]
    for place, name in enumerate(found.groups):
        row: dict[str, object] = {found.kind: name}
        if everyone.count:
            mean, deviation = everyone.mean[place], everyone.deviation[place]
            row |= {
                "values": everyone.count[place],
                "mean": "" if mean is None else f"{mean:.6g}",
                "deviation": "" if deviation is None else f"{deviation:.6g}",
            }
            if any(everyone.beyond):
                row["beyond 2^30"] = everyone.beyond[place]
        if everyone.missing:
            row["missing"] = everyone.missing[place]
        if everyone.histogram:
            row |= dict(zip(bins, everyone.histogram[place], strict=True))
        if len(row) > 1:
            yield row


def _length_row(lengths: tuple[int, ...]) -> dict[str, object]:
    """Return the mean and quantiles of text lengths; ``lengths[k]`` texts have k + 1 tokens."""
    total = sum(lengths)
    row: dict[str, object] = {"texts": total}
    if total:
        row["mean"] = f"{sum((place + 1) * count for place, count in enumerate(lengths)) / total:.2f}"
    for name, share in (("median", 0.5), ("95 %", 0.95), ("longest", 1.0)):
        seen = 0
        for place, count in enumerate(lengths, 1):
            seen += count
            if total and seen >= share * total:
                row[name] = place
                break
    return row
