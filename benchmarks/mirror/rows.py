"""A model of random bytes, from the server's publisher to a device's fetcher, beside or through a real Mosquitto."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.common.machine import own_environment
from benchmarks.mirror.told import Fetched, Published, Trial, Way
from edgefl.errors import EdgeflError
from edgefl.lab.broker import free_port
from edgefl.system.memory import status_bytes
from edgefl.system.processes import child_process, last_line
from edgefl.system.python import module_command
from edgefl.system.structs import filled
from edgefl_server.broker import mosquitto_command

UNIT_BYTES = 64 << 20
"""Of a unit: a device reads one at a time."""
_END_S = 30.0
_Told = TypeVar("_Told", Published, Fetched)
_Process = subprocess.Popen[str]


class MirrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds``: of the device, from the announcement to the last byte, each checked; ``publish_s``: of the server. Peaks
    are resident sets (VmHWM) of whole processes, the mirror's 0 where there is none. ``message_bytes`` are those of the
    announcement, ``page_bytes`` of what it was too large for."""

    way: Way
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


def measure(way: Way, nbytes: int, unit_bytes: int = UNIT_BYTES) -> MirrorRow:
    """One way. EdgeflError where a process fails."""
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
        trial = Trial(way=way, port=port, nbytes=nbytes, unit_bytes=unit_bytes, folder=str(blobs), mirror=url)
        server = stack.enter_context(_side("server", trial, folder))
        published = _told(server, Published, folder / "server-side.log")
        own = msgspec.structs.replace(trial, folder=str(folder / "store"))
        device = stack.enter_context(_side("device", own, folder))
        fetched = _told(device, Fetched, folder / "device-side.log")
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


def _side(name: str, trial: Trial, folder: Path) -> AbstractContextManager[_Process]:
    command = module_command(f"benchmarks.mirror.{name}", msgspec.json.encode(trial).decode())
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
        raise EdgeflError(
            f"the {log.stem} of the bench ended: {last_line(log.read_text(), 'without a word')}"
        )
    return line


def _told(process: _Process, kind: type[_Told], log: Path) -> _Told:
    return msgspec.json.decode(_line(process, log), type=kind)


def _peak(process: _Process) -> int:
    return status_bytes("VmHWM", process.pid)
