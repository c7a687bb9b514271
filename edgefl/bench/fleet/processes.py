"""The broker and the server of a measurement, and what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from device_runtime.memory import status_bytes
from edgefl.bench.common.machine import quiet_environment
from edgefl.bench.common.processes import family, resident_bytes
from edgefl.bench.fleet.federation import Case, federation_of
from edgefl.config.text import dump
from edgefl.system.files import write_text
from edgefl.system.parent import PARENT
from edgefl.system.processes import end_process, last_line
from edgefl.wire.errors import EdgeflError
from server.broker import mosquitto_command
from server.workshop.process import INSIDE


class Watched:
    """A process and its children: processor seconds, and bytes of memory."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def cpu_s(self) -> float:
        """Return the processor seconds of all of them so far, including those that have ended."""
        total = 0.0
        for each in self._all():
            with suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def resident_bytes(self) -> int:
        """Resident set sizes together, without what ends by itself before long."""
        return resident_bytes(self._staying())

    def forget_peak(self) -> None:
        """The highest resident set size counts from now on (Linux)."""
        for each in self._all():
            with suppress(OSError):
                Path(f"/proc/{each.pid}/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """The highest resident set size of each since :meth:`forget_peak`, together."""
        return sum(status_bytes("VmHWM", each.pid) for each in self._staying())

    def _staying(self) -> list[psutil.Process]:
        """Return all but the process that composed the run: nothing is evaluated here, so it is not needed again."""
        staying = []
        for each in self._all():
            with suppress(psutil.Error):
                if not any(INSIDE in word for word in each.cmdline()):
                    staying.append(each)
        return staying

    def _all(self) -> list[psutil.Process]:
        return family(self.process.pid)


@contextmanager
def running_broker(port: int, folder: Path) -> Iterator[Watched]:
    """Mosquitto with the configuration that edgefl ships, which tells its counters each second."""
    folder.mkdir(parents=True, exist_ok=True)
    command = mosquitto_command(port, folder)
    with (folder / "mosquitto.conf").open("a", encoding="utf-8") as config:
        config.write("sys_interval 1\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    with _ended(process):
        yield Watched(process)


@contextmanager
def running_server(case: Case, port: int, folder: Path) -> Iterator[Watched]:
    """`edgefl server --json`; its standard output is a pipe that does not block."""
    config = folder / "federation.toml"
    write_text(config, dump(federation_of(case, port)))
    command = [sys.executable, "-m", "edgefl", "server", "--config", str(config)]
    command += [
        "--out",
        str(folder / "run"),
        "--json",
        "--broker",
        f"127.0.0.1:{port}",
        "--sign-key",
        str(folder / "signing.key"),
    ]
    environment = {**os.environ, **quiet_environment(), PARENT: str(os.getpid())}
    with (folder / "server-log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
        )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with _ended(process):
        yield Watched(process)


def last_words(log: Path, what: str) -> EdgeflError:
    """Return an error with the last line of a process that ended too early."""
    text = log.read_text(errors="replace") if log.exists() else ""
    words = last_line(text, "it said nothing").removeprefix("error: ")
    return EdgeflError(f"the {what} ended during the measurement: {words}")


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        end_process(process)
        if process.stdout is not None:
            process.stdout.close()
