"""``python -m benchmarks fleet``, ``coordinator``, ``dashboard``, ``mirror``, ``faults`` and ``fuzz``: the server's side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.report import BrokerKind, Json, bench, mebibytes, print_rows
from edgefl.cli.options import parse_bytes
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from benchmarks.dashboard.rows import DashboardRow
    from benchmarks.faults.campaign import FaultRow
    from benchmarks.fleet.rows import FleetRow
    from benchmarks.fuzz.rows import FuzzRow
    from benchmarks.mirror.rows import MirrorRow

_Share = Annotated[
    float, typer.Option(min=0, max=1, help="share of the tasks, as in `python -m benchmarks load`")
]


def fleet(
    devices: Annotated[int, typer.Option(min=0, help="connections; 0: the rows above")] = 0,
    selected: Annotated[int, typer.Option(min=0, help="devices of a round; 0: all")] = 0,
    update: Annotated[str, typer.Option(help="dense, onebit, middle or small")] = "dense",
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are counted")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="processes that take updates in")] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="seconds after which a round closes")] = 120.0,
    fetch: Annotated[bool, typer.Option("--fetch", help="devices fetch bundle and weights too")] = False,
    train: Annotated[float, typer.Option(min=0, help="seconds from a task to its update")] = 0.0,
    progress_rate: Annotated[
        float, typer.Option("--progress", min=0, max=5, help="messages a second while they train")
    ] = 0.0,
    vanish: _Share = 0.0,
    late: _Share = 0.0,
    duplicate: _Share = 0.0,
    garbage: _Share = 0.0,
    away: Annotated[float, typer.Option(min=0, help="seconds until one that vanished is back")] = 30.0,
    as_json: Json = False,
) -> None:
    """Rounds of many devices that are connected at once: their time, and what server and broker take for them.

    Mosquitto runs with the configuration that edgefl ships, the server is `edgefl server`, and all devices are connections
    of one process that trains nothing (`python -m benchmarks load`): broker, server and generator share this machine.
    Updates are dense (a ResNet-20, 1.1 MB), onebit (the same in one bit an entry), middle (321 KB) or small (3 KB). The
    first round is not counted, and three more are not where few of the devices are selected: the others listen until they
    rest.

    Without --devices the rows are: 1,000 devices with dense and with onebit updates; 100 of 100 and 100 of 10,000 selected;
    3,000 with 321 KB. That takes some minutes.

    Examples:

      python -m benchmarks fleet --json

      python -m benchmarks fleet --devices 300 --update onebit --rounds 3

      python -m benchmarks fleet --devices 10000 --selected 100 --update onebit --json
    """

    from benchmarks.fleet.rows import Case, measure
    from benchmarks.generator.settings import Shares

    cases = [
        Case(
            connected,
            selected=tasks,
            update=size,
            rounds=rounds,
            workers=workers,
            deadline_s=deadline,
            fetch=fetch,
            train_s=train,
            progress_s=progress_rate,
            away_s=away,
            shares=Shares(vanish, late, duplicate, garbage),
        )
        for connected, tasks, size in ([(devices, selected, update)] if devices else _CASES)
    ]
    bench(
        "fleet",
        "rounds of a fleet",
        cases,
        measure,
        _columns,
        as_json,
    )


_CASES = (
    (1000, 0, "dense"),
    (1000, 0, "onebit"),
    (100, 100, "onebit"),
    (10_000, 100, "onebit"),
    (3000, 0, "middle"),
)
"""Devices, selected, updates."""


def coordinator(as_json: Json = False) -> None:
    """Time of the coordinator's step for one event, while a round with 100, 1,000 and 10,000 assignments is open.

    Events are the answers of devices, hellos and statuses as the server takes them in between two of its ticks, and ticks.
    No broker and no process of its own is involved.

    Example:

      python -m benchmarks coordinator --json
    """

    from benchmarks.coordinator import measure

    print_rows("coordinator", measure([100, 1000, 10_000], events=500), as_json)


def _columns(row: FleetRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "devices": row.devices,
        "selected": row.selected,
        "update": row.update,
        "connect s": row.connect_s,
        "round s": row.round_p50_s,
        "cycle s": row.cycle_p50_s,
        "CPU s/1000": row.server_cpu_s_per_1000,
        "MiB": mebibytes(row.server_peak_bytes),
        "ack p99 s": row.ack_p99_s,
        "resent": f"{row.resent_share:.1%}",
        "dropped": row.dropped_messages,
    }


def dashboard(
    devices: Annotated[list[int] | None, typer.Option(help="may be repeated; default: 1000")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are over")] = 100,
    seconds: Annotated[float, typer.Option(min=1.0, help="for which devices tell of their progress")] = 20.0,
    as_json: Json = False,
) -> None:
    """Measure the first paint of the fleet's page, and the cost of updating it while all devices report their progress.

    The run is made up, through the server's own journal and feed; the page is served as by `edgefl dashboard` and looked at
    in headless Chromium. 1,000 devices and 100 rounds take some minutes to make up.

    Examples:

      python -m benchmarks dashboard --json

      python -m benchmarks dashboard --devices 100 --devices 1000 --rounds 20
    """

    from benchmarks.dashboard.rows import measure

    bench(
        "dashboard",
        "the fleet's page",
        devices or [1000],
        lambda count, tell: measure(devices=count, rounds=rounds, seconds=seconds, tell=tell),
        _dashboard_columns,
        as_json,
    )


def _dashboard_columns(row: DashboardRow) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "rounds": row.rounds,
        "ready s": row.ready_s,
        "first paint s": row.first_paint_s,
        "words/s": row.updates_per_s,
        "of a core": f"{row.cpu_share:.1%}",
        "browser": f"{row.browser_cpu_share:.1%}",
        "memory": size(row.rss_bytes),
    }


Way = StrEnum("Way", ["broker", "mirror"])


def mirror(
    nbytes: Annotated[str, typer.Option("--bytes", help="of the model, like 2GiB")] = "256MiB",
    unit: Annotated[str, typer.Option(help="of each unit of it")] = "64MiB",
    way: Annotated[list[Way] | None, typer.Option(help="may be repeated; default: both")] = None,
    as_json: Json = False,
) -> None:
    """A model of random bytes, from the server's publisher to a device's store: by the broker, and by a mirror.

    A real Mosquitto, and each side a process of its own. seconds: of the device, from the announcement to the last byte,
    each checked against its digest. Peaks are resident sets of whole processes. Needs twice the bytes on the disk, and for
    the broker's way twice in memory: its retained messages, and the server's blobs.

    Examples:

      python -m benchmarks mirror --bytes 2GiB --json

      python -m benchmarks mirror --bytes 256MiB --way mirror
    """

    from benchmarks.mirror.rows import measure

    total, unit_bytes = parse_bytes(nbytes, "--bytes"), parse_bytes(unit, "--unit")
    bench(
        "mirror",
        f"{nbytes} in units of {unit}",
        way or Way,
        lambda each, _: measure(each.value, total, unit_bytes),  # type: ignore[arg-type]
        _mirror_columns,
        as_json,
    )


def _mirror_columns(row: MirrorRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "way": row.way,
        "publish s": row.publish_s,
        "fetch s": row.seconds,
        "device MiB": mebibytes(row.device_peak_bytes),
        "server MiB": mebibytes(row.server_peak_bytes),
        "broker MiB": mebibytes(row.broker_peak_bytes),
        "mirror MiB": mebibytes(row.mirror_peak_bytes),
        "page KB": f"{row.page_bytes / 1e3:.0f}",
    }


Target = StrEnum("Target", ["server", "agent"])


def faults(
    schedules: Annotated[int, typer.Option(min=1, help="how many, each from a seed of its own")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 1,
    schedule: Annotated[
        Path | None, typer.Option(help="a file of faults (TOML or JSON) in place of random ones")
    ] = None,
    broker: BrokerKind = "auto",
    keep: Annotated[
        Path | None, typer.Option(help="folder for what runs with other weights leave behind")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train under random faults and compare each run with the same run without faults.

    Three devices train a small model for three rounds over links that are slow, cut, half open, stalled or send packets
    twice; processes are killed and stopped, disks are full, clocks jump. A row has the seed, its faults, and whether the run
    ended with the very weights of the undisturbed one, or why not; refusals are the words of a process that ended the run,
    which is then taken up again. The exit code is 1 if a row has other weights.

    Seeds are --seed, --seed + 1, and so on: `--seed 17 --schedules 1` runs the faults of seed 17 again. A row's faults as
    {"seed": 17, "faults": [...]} in a JSON file are a schedule for `edgefl run --faults FILE`, and for --schedule here.

    Examples:

      python -m benchmarks faults --schedules 20 --json

      python -m benchmarks faults --seed 17 --schedules 1 --keep runs/seed-17
    """

    from benchmarks.faults.campaign import FaultCampaign
    from edgefl.lab.faults.schedule import load_schedule

    with FaultCampaign(broker=broker, keep=keep) as campaign:
        cases = [load_schedule(schedule)] if schedule else campaign.random(range(seed, seed + schedules))
        rows = bench(
            "faults", "runs under faults", cases, campaign.measure, _fault_columns, as_json, _fault_line
        )
    if not all(row.same for row in rows):
        raise typer.Exit(1)


def _fault_line(row: FaultRow) -> str:
    faults = "; ".join(map(str, row.faults))
    refused = f", refused {len(row.refusals)} times" if row.refusals else ""
    return f"seed {row.seed}, {row.seconds:g} s{refused}: {row.why or 'same weights'} ({faults})"


def _fault_columns(row: FaultRow) -> dict[str, Any]:
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
    broker: BrokerKind = "auto",
    as_json: Json = False,
) -> None:
    """Send invalid messages to a running server and a running agent while an honest federation trains.

    They are genuine messages of that federation with bits, bytes, fields and topics changed. The last round stays open until
    all were sent. A row has the target, the ended processes and the growth of memory and folder in bytes. It also has
    whether the honest rounds ended with the weights of an undisturbed run. The exit code is 1 if a row is not as it should
    be.

    Examples:

      python -m benchmarks fuzz --messages 20000 --json

      python -m benchmarks fuzz --messages 1000000 --target server --json
    """

    from benchmarks.fuzz.rows import measure

    with TemporaryDirectory(prefix="edgefl-fuzz-") as folder:
        rows = bench(
            "fuzz",
            "under fuzzed messages",
            target or Target,
            lambda each, tell: measure(
                each.value,  # type: ignore[arg-type]
                messages=messages,
                seed=seed,
                broker=broker,
                folder=Path(folder) / each.value,
                tell=tell,
            ),
            _fuzz_columns,
            as_json,
            _fuzz_line,
        )
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
