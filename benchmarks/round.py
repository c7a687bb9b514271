"""``python -m benchmarks round``: cost of the framework itself, in rounds whose devices return their weights at once."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.federations import broker_kind, events_of, lab_of
from benchmarks.machine import cpu_seconds, family
from benchmarks.options import BrokerKind, Json, check_choice
from benchmarks.repetition import median
from benchmarks.results import print_rows
from edgefl.api.progress import reporting
from edgefl.config import parse
from edgefl.errors import ConfigError
from edgefl.lab.broker import free_port
from edgefl.lab.lab import Lab
from edgefl.setup.tiers import completed
from edgefl.system.processes import child_process
from edgefl_server.access.certificates import LabAuthority
from edgefl_server.broker import mosquitto_base, mosquitto_program


class RoundTimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds after the first. All messages are signed, with ``tls`` or without.

    ``server_cpu_s`` is processor time of the server process per round.
    """

    devices: int
    model: str
    broker: str
    tls: bool
    rounds: int
    round_s: float
    round_min_s: float
    server_cpu_s: float
    down_bytes: int
    up_bytes: int


def round_time(
    devices: Annotated[int, typer.Option(min=1, help="device processes")] = 16,
    model: Annotated[str, typer.Option(help="model whose weights are moved")] = "resnet20",
    rounds: Annotated[int, typer.Option(min=2, help="rounds; the first is not counted")] = 8,
    broker: BrokerKind = "auto",
    tls: Annotated[bool, typer.Option("--tls", help="through TLS too (mosquitto)")] = False,
    as_json: Json = False,
) -> None:
    """Time of a round in which devices return their weights at once."""
    check_choice([model])

    kind = broker_kind(broker)
    with reporting(f"{rounds} rounds with {devices} devices"):
        rows = [
            measure(devices=devices, model=model, rounds=rounds, broker=kind, tls=secure)
            for secure in ([False, True] if tls else [False])
        ]
    print_rows("round", rows, as_json)


def measure(
    *, devices: int, model: str = "resnet20", rounds: int = 8, broker: str, tls: bool = False
) -> RoundTimeRow:
    """Start a broker, a server and ``devices`` agents; each round moves the whole model down and up, without training.

    Raises ConfigError for ``tls`` with another broker than Mosquitto.
    """
    if tls and broker != "mosquitto":
        raise ConfigError(
            f"--tls expects the broker mosquitto, found {broker!r}; install mosquitto or leave --tls out",
            broker=broker,
        )
    tables: dict[str, Any] = {
        "federation": {"name": "bench-round", "rounds": rounds},
        "model": {"name": model},
        "algorithm": {"name": "benchmarks.echo:echo"},
        "data": {"name": "random", "partition": "iid", "train_samples": 32 * devices},
        "round": {"evaluate_every": 0},
        "tiers": {"strong": {"cut": 0, "count": devices}},
        "broker": {"kind": broker},
    }
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder, ExitStack() as stack:
        if tls:
            tables["broker"] = stack.enter_context(_tls_broker(Path(folder)))
        federation = completed(parse(tables, source="the benchmark"))
        lab = lab_of(federation, Path(folder) / "run")
        seconds, cpu, bytes_moved = _watch(lab)
    return RoundTimeRow(
        devices=devices,
        model=model,
        broker=broker,
        tls=tls,
        rounds=len(seconds),
        round_s=median(seconds[1:], 4),
        round_min_s=round(min(seconds[1:]), 4),
        server_cpu_s=round((cpu[-1] - cpu[0]) / (len(cpu) - 1), 4),
        down_bytes=bytes_moved[0],
        up_bytes=bytes_moved[1],
    )


@contextmanager
def _tls_broker(folder: Path) -> Iterator[dict[str, Any]]:
    """Run a Mosquitto with a certificate and anonymous access; yield the federation file's table of the broker."""
    authority, host, port = LabAuthority(folder), "127.0.0.1", free_port()
    pair = authority.broker(host)
    lines = [f"listener {port} {host}", f"certfile {pair.certificate}", f"keyfile {pair.key}"]
    config = folder / "mosquitto.conf"
    config.write_text("\n".join([*mosquitto_base(), "allow_anonymous true", *lines]) + "\n")
    with child_process([mosquitto_program(), "-c", str(config)], stderr=subprocess.DEVNULL):
        yield {"kind": "external", "host": host, "port": port, "ca_file": str(authority.own.certificate)}


def _watch(lab: Lab) -> tuple[list[float], list[float], tuple[int, int]]:
    """Return seconds per round, processor seconds of the server after each, and the bytes of the last round."""
    seconds: list[float] = []
    cpu: list[float] = []
    moved = (0, 0)
    for event in events_of(lab):
        if event.get("event") == "roundclosed":
            seconds.append(event["seconds"])
            server = family(lab.supervisor.pid("server"))[:1]
            cpu.append(cpu_seconds(server) if server else cpu[-1])
            moved = (event["down_bytes"], event["up_bytes"])
    return seconds, cpu, moved
