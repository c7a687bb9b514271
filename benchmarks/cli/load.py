"""``python -m benchmarks load``: many devices that train nothing, to see what a server and its broker stand."""

from __future__ import annotations

from typing import Annotated

import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import Broker, Engine, PasswordFile, address, parse_bytes, parse_limits
from edgefl.cli.output import errors, print_json, print_table

_Share = Annotated[float, typer.Option(min=0, max=1, help="share of the tasks")]


def load(
    federation: Annotated[str, typer.Option(help="name of the federation")] = "demo",
    devices: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many connect")] = 100,
    broker: Broker = "localhost:1883",
    password_file: PasswordFile = "",
    prefix: Annotated[str, typer.Option(help="what their names begin with, before a number")] = "load-",
    first: Annotated[int, typer.Option(min=0, help="the first number")] = 0,
    seed: Annotated[str, typer.Option(help="decides keys and who behaves badly")] = "0",
    tier: Annotated[str, typer.Option(help="the tier that they ask for; default: the server decides")] = "",
    memory: Annotated[str, typer.Option(help="what each says it has")] = "16GiB",
    samples: Annotated[int, typer.Option(min=1, help="what each says it holds")] = 100,
    format: Annotated[Engine, typer.Option(help="format of the bundles that they take")] = Engine.onnx,
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch bundle and weights too")] = False,
    train: Annotated[float, typer.Option(min=0, help="seconds from a task to its update")] = 0.0,
    progress_rate: Annotated[
        float, typer.Option("--progress", min=0, max=5, help="messages a second while they train")
    ] = 0.0,
    vanish: _Share = 0.0,
    late: _Share = 0.0,
    duplicate: _Share = 0.0,
    garbage: _Share = 0.0,
    away: Annotated[float, typer.Option(min=0, help="seconds until one that vanished is back")] = 30.0,
    late_by: Annotated[
        float, typer.Option(min=0, help="seconds until a late update; 0: the deadline is over")
    ] = 0.0,
    connecting: Annotated[int, typer.Option(min=1, help="how many connect at once")] = 64,
    seconds: Annotated[float, typer.Option(min=0, help="how long; 0: until the training is done")] = 0.0,
    limit: Annotated[list[str] | None, typer.Option(help="a limit as NAME=VALUE; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the numbers as one JSON object")] = False,
) -> None:
    """Load a server with many devices that speak the protocol and train nothing.

    One process holds all of their connections. They sign with keys made of --seed and their names, take tasks, and send
    updates of the form that their tier has, with random numbers in them: never point this at a federation whose model is
    wanted. They fetch the manifest only, unless --fetch is given.

    --vanish, --late, --duplicate and --garbage are shares of the tasks, from 0 to 1, that are dealt with badly: the
    connection breaks and is back after --away seconds, the update comes after the round's deadline, it comes twice, or what
    comes is no update.

    Examples:

      python -m benchmarks load --broker localhost:1883 --federation demo --devices 1000 --prefix strong-

      python -m benchmarks load --federation demo --devices 300 --vanish 0.1 --late 0.1 --garbage 0.1 --json
    """

    from benchmarks.generator.fleet import Fleet
    from benchmarks.generator.settings import Load, Shares

    wanted = Load(
        federation=federation,
        devices=devices,
        prefix=prefix,
        first=first,
        seed=seed,
        tier=tier,
        memory_bytes=parse_bytes(memory, "--memory"),
        samples=samples,
        format=format.value,
        fetch=fetch,
        train_s=train,
        progress_s=progress_rate,
        connecting=connecting,
        away_s=away,
        late_s=late_by,
        shares=Shares(vanish, late, duplicate, garbage),
        limits=parse_limits(limit or []),
    )
    with reporting(f"making {devices:,} keys") as tell:
        fleet = Fleet(
            wanted,
            address(broker, password_file=password_file),
            say=errors.print,
        )
        fleet.watch(tell)
        summary = fleet.run(seconds)
    if as_json:
        print_json(summary)
        return
    import msgspec

    rows = msgspec.to_builtins(summary)
    print_table("load", [{"what": name.replace("_", " "), "value": value} for name, value in rows.items()])
