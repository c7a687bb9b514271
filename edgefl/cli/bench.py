"""``edgefl bench``: measure on this machine."""

from __future__ import annotations

import shutil
from typing import Annotated, Any

import typer

from edgefl.cli.output import console, print_json, print_table

_HELP = """
Measure speed, memory and size on this machine, on real processes.

Examples:

  edgefl bench memory --json

  edgefl bench round --devices 16 --json
"""
_Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=_HELP, no_args_is_help=True)
    group.command("memory")(memory)
    group.command("round")(round_)
    app.add_typer(group, name="bench")


def memory(
    model: Annotated[str, typer.Option(help="a model with preset tiers")] = "resnet20",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions, each with fresh processes")] = 3,
    as_json: _Json = False,
) -> None:
    """Peak memory of an agent in training over the same agent idle, per tier."""
    from edgefl.bench.memory import measure

    with console.status("training one round per tier and repetition"):
        rows = measure(model=model, batch=batch, steps=steps, repeat=repeat)
    _print("memory", rows, as_json)


def round_(
    devices: Annotated[int, typer.Option(min=1, help="device processes")] = 16,
    model: Annotated[str, typer.Option(help="model whose weights are moved")] = "resnet20",
    rounds: Annotated[int, typer.Option(min=2, help="rounds; the first is not counted")] = 8,
    broker: Annotated[
        str, typer.Option(help="auto (mosquitto where it is installed), mosquitto or amqtt")
    ] = "auto",
    as_json: _Json = False,
) -> None:
    """Time of a round in which devices return their weights at once."""
    from edgefl.bench.round_time import measure

    kind = ("mosquitto" if shutil.which("mosquitto", path=_PATH) else "amqtt") if broker == "auto" else broker
    with console.status(f"{rounds} rounds with {devices} devices"):
        row = measure(devices=devices, model=model, rounds=rounds, broker=kind)
    _print("round", [row], as_json)


_PATH = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/sbin"


def _print(name: str, rows: list[Any], as_json: bool) -> None:
    import msgspec

    from edgefl.bench.machine import machine

    plain = [msgspec.to_builtins(row) for row in rows]
    if as_json:
        print_json({"bench": name, "machine": machine(), "results": plain})
    else:
        print_table(name, plain)
