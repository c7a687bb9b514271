"""``edgefl bench faults`` and ``edgefl bench fuzz``: what a federation makes of a hostile world."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, report

if TYPE_CHECKING:
    from edgefl.bench.faults.campaign import FaultRow
    from edgefl.bench.fuzz.rows import FuzzRow

Target = StrEnum("Target", ["server", "agent"])

_Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]
_Broker = Annotated[str, typer.Option(help="auto (mosquitto where it is installed), mosquitto or amqtt")]


def faults(
    schedules: Annotated[int, typer.Option(min=1, help="how many, each from a seed of its own")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 1,
    schedule: Annotated[
        Path | None, typer.Option(help="a file of faults (TOML or JSON) in place of random ones")
    ] = None,
    broker: _Broker = "auto",
    keep: Annotated[
        Path | None, typer.Option(help="folder for what runs with other weights leave behind")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Train under random faults and compare each run with the same run without faults.

    Three devices train a small model for three rounds over links that are slow, cut, half open, stalled or send packets
    twice; processes are killed and stopped, disks are full, clocks jump. A row has the seed, its faults, and whether the run
    ended with the very weights of the undisturbed one, or why not; refusals are the words of a process that ended the run,
    which is then taken up again. The exit code is 1 if a row has other weights.

    Seeds are --seed, --seed + 1, and so on: `--seed 17 --schedules 1` runs the faults of seed 17 again. A row's faults as
    {"seed": 17, "faults": [...]} in a JSON file are a schedule for `edgefl run --faults FILE`, and for --schedule here.

    Examples:

      edgefl bench faults --schedules 20 --json

      edgefl bench faults --seed 17 --schedules 1 --keep runs/seed-17
    """

    from edgefl.bench.faults.rows import Campaign
    from edgefl.lab.faults.schedule import load_schedule

    with Campaign(broker=broker, keep=keep) as campaign:
        cases = [load_schedule(schedule)] if schedule else campaign.random(range(seed, seed + schedules))
        rows, failed = measured(cases, campaign.measure, _line)
    report("faults", "runs under faults", rows, _columns, as_json, failed)
    if not all(row.same for row in rows):
        raise typer.Exit(1)


def _line(row: FaultRow) -> str:
    faults = "; ".join(map(str, row.faults))
    refused = f", refused {len(row.refusals)} times" if row.refusals else ""
    return f"seed {row.seed}, {row.seconds:g} s{refused}: {row.why or 'same weights'} ({faults})"


def _columns(row: FaultRow) -> dict[str, Any]:
    return {
        "seed": row.seed,
        "faults": ", ".join(fault.kind for fault in row.faults),
        "rounds": row.rounds,
        "same": row.same,
        "refused": len(row.refusals),
        "s": row.seconds,
    }


def fuzz(
    messages: Annotated[int, typer.Option(min=1, help="how many, to each target")] = 20_000,
    target: Annotated[
        list[Target] | None, typer.Option(help="server or agent, may be repeated; default: both")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="decides the messages")] = 1,
    broker: _Broker = "auto",
    as_json: _Json = False,
) -> None:
    """Send invalid messages to a running server and a running agent while an honest federation trains.

    They are genuine messages of that federation with bits, bytes, fields and topics changed. The last round stays open until
    all were sent. A row has the target, the ended processes and the growth of memory and folder in bytes. It also has
    whether the honest rounds ended with the weights of an undisturbed run. The exit code is 1 if a row is not as it should
    be.

    Examples:

      edgefl bench fuzz --messages 20000 --json

      edgefl bench fuzz --messages 1000000 --target server --json
    """

    from edgefl.bench.fuzz.rows import measure

    with TemporaryDirectory(prefix="edgefl-fuzz-") as folder:
        rows, failed = measured(
            list(target or Target),
            lambda each, tell: measure(
                each.value,  # type: ignore[arg-type]
                messages=messages,
                seed=seed,
                broker=broker,
                folder=Path(folder) / each.value,
                tell=tell,
            ),
            _fuzz_line,
        )
    report("fuzz", "under fuzzed messages", rows, _fuzz_columns, as_json, failed)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def _fuzz_line(row: FuzzRow) -> str:
    return f"{row.target}: {row.messages:,} messages in {row.seconds:g} s: {row.why or 'as it should be'}"


def _fuzz_columns(row: FuzzRow) -> dict[str, Any]:
    return {
        "target": row.target,
        "messages": f"{row.messages:,}",
        "s": row.seconds,
        "crashes": row.crashes,
        "MiB": f"{row.rss_growth / 2**20:.1f}",
        "MiB on disk": f"{row.disk_growth / 2**20:.1f}",
        "accepted": f"{row.accepted} of {row.expected}",
        "same": row.same,
    }
