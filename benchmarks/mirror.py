"""``python -m benchmarks mirror``: a model of random bytes from the server's publisher to a device's store.

The bytes travel by a real Mosquitto, or by a mirror; each side is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from benchmarks.machine import own_environment
from benchmarks.options import Json
from benchmarks.results import bench, mebibytes
from benchmarks.workers.mirror import FetchReport, MirrorTrial, PublishReport, Route
from edgefl.cli.options import parse_bytes
from edgefl.errors import EdgeflError
from edgefl.lab.broker import free_port
from edgefl.system.memory import status_bytes
from edgefl.system.processes import child_process, last_line, module_command
from edgefl.system.structs import filled
from edgefl_server.broker import mosquitto_command

UNIT_BYTES = 64 << 20
"""Bytes of a unit: a device reads one at a time."""
_END_S = 30.0
Way = StrEnum("Way", ["broker", "mirror"])
_Report = TypeVar("_Report", PublishReport, FetchReport)
_Process = subprocess.Popen[str]


class MirrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer. Peaks are resident sets (VmHWM) of whole processes; the mirror's is 0 without one.

    Attributes:
        seconds: time of the device from the announcement to the last byte, each checked.
        publish_s: time of the server.
        message_bytes: size of the announcement.
        page_bytes: size of the pages with the units that the announcement has no room for.
    """

    way: Route
    bytes: int
    units: int
    seconds: float
    publish_s: float
    device_peak_bytes: int
    server_peak_bytes: int
    broker_peak_bytes: int
    mirror_peak_bytes: int
    message_bytes: int
    page_bytes: int
    broker_bytes: int
    mirror_bytes: int


def mirror(
    nbytes: Annotated[str, typer.Option("--bytes", help="of the model, like 2GiB")] = "256MiB",
    unit: Annotated[str, typer.Option(help="of each unit of it")] = "64MiB",
    way: Annotated[list[Way] | None, typer.Option(help="may be repeated; default: both")] = None,
    as_json: Json = False,
) -> None:
    """A model of random bytes, from the server's publisher to a device's store: by the broker, and by a mirror.

    Broker, server and device are processes; the broker is Mosquitto. seconds is the device's time from the announcement to
    the last byte, each checked against its digest. Peaks are resident sets of whole processes. The disk needs twice the
    bytes, and the broker's way needs twice the bytes of memory, for its retained messages and the server's blobs.

    Examples:

      python -m benchmarks mirror --bytes 2GiB --json

      python -m benchmarks mirror --bytes 256MiB --way mirror
    """

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


def measure(way: Route, nbytes: int, unit_bytes: int = UNIT_BYTES) -> MirrorRow:
    """Measure one way. Raises EdgeflError if a process ends."""
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-mirror-") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        blobs = folder / "blobs"
        blobs.mkdir()
        broker = stack.enter_context(_process(mosquitto_command(port, folder), folder / "broker.log"))
        mirror, url = None, ""
        if way == "mirror":
            command = module_command("edgefl", "mirror", str(blobs), "--port", "0", "--json")
            mirror = stack.enter_context(_process(command, folder / "mirror.log"))
            url = _line(mirror, folder / "mirror.log").rpartition(" at ")[2].partition('"')[0]
        trial = MirrorTrial(
            way=way, port=port, nbytes=nbytes, unit_bytes=unit_bytes, folder=str(blobs), mirror=url
        )
        server = stack.enter_context(_side("server", trial, folder))
        published = _report(server, PublishReport, folder / "server-side.log")
        own = msgspec.structs.replace(trial, folder=str(folder / "store"))
        device = stack.enter_context(_side("device", own, folder))
        fetched = _report(device, FetchReport, folder / "device-side.log")
        return filled(
            MirrorRow,
            published,
            fetched,
            way=way,
            bytes=nbytes,
            units=len(trial.units),
            seconds=round(fetched.seconds, 3),
            publish_s=round(published.seconds, 3),
            device_peak_bytes=fetched.peak_bytes,
            server_peak_bytes=_peak(server),
            broker_peak_bytes=_peak(broker),
            mirror_peak_bytes=_peak(mirror) if mirror is not None else 0,
        )


def _side(name: str, trial: MirrorTrial, folder: Path) -> AbstractContextManager[_Process]:
    command = module_command("benchmarks.workers.mirror", name, msgspec.json.encode(trial).decode())
    return _process(command, folder / f"{name}-side.log")


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[_Process]:
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, **own_environment()}
    with (
        log.open("w") as stderr,
        child_process(command, within_s=_END_S, stderr=stderr, **options) as process,
    ):
        yield process


def _line(process: _Process, log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise EdgeflError(f"the {log.stem} of the benchmark ended: {last_line(log.read_text(), 'no output')}")
    return line


def _report(process: _Process, kind: type[_Report], log: Path) -> _Report:
    return msgspec.json.decode(_line(process, log), type=kind)


def _peak(process: _Process) -> int:
    return status_bytes("VmHWM", process.pid)
