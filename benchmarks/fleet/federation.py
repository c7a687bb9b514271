"""Federation of the benchmark ``fleet``, without training or evaluation, and its measured processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load.settings import LoadSettings
from benchmarks.machine import family, quiet_environment, resident_bytes
from edgefl.config import Federation, parse
from edgefl.config.text import dump
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.tiers import completed
from edgefl.system.files import write_text
from edgefl.system.memory import status_bytes
from edgefl.system.processes import PARENT, child_process, last_line, module_command
from edgefl_server.broker import mosquitto_command
from edgefl_server.torch_process.process import INSIDE

NAME, TIER = "bench-fleet", "fleet"
_UNTIL_REST = 3
"""Rounds after which devices without a task have unsubscribed: two without a task, and one more."""
_ECHO = {"name": "benchmarks.echo:echo"}
_RESNET = {"model": {"name": "resnet20"}, "data": {"name": "random"}}


def _mlp(data: str, channels: int, size: int, hidden: int) -> dict[str, Any]:
    options = {"in_channels": channels, "size": size, "hidden": [hidden]}
    return {"model": {"name": "mlp", "options": options}, "data": {"name": data}}


UPDATES: dict[str, dict[str, Any]] = {
    "dense": _RESNET,
    "onebit": {**_RESNET, "codec": {"name": "scaled_sign"}},
    "middle": _mlp("random", 3, 32, 26),
    "small": _mlp("digits", 1, 8, 10),
}
"""Tables of the federation file by size of its updates: 1.1 MB and 37 KB (ResNet-20), 321 KB and 3 KB (dense layers)."""


@dataclass(frozen=True, kw_only=True)
class FleetCase(LoadSettings):
    """Load of which ``selected`` devices get a task in each of ``rounds`` rounds. ``workers`` are the server's processes."""

    federation: str = NAME
    prefix: str = f"{TIER}-"
    until_done: bool = False
    selected: int = 0
    update: str = "dense"
    rounds: int = 5
    workers: int = 1
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update not in UPDATES:
            raise ConfigError(
                f"no update {self.update!r}; choose one of: {', '.join(UPDATES)}", update=self.update
            )
        if self.selected > self.devices:
            raise ConfigError(
                f"--selected expects at most {self.devices} devices, found {self.selected}; connect more devices",
                selected=self.selected,
                devices=self.devices,
            )

    @property
    def tasks(self) -> int:
        """Tasks of a round."""
        return self.selected or self.devices

    @property
    def uncounted(self) -> int:
        """Rounds that do not count: kernels load in the first, and devices without tasks unsubscribe after some."""
        return 1 if self.tasks == self.devices else 1 + _UNTIL_REST

    def __str__(self) -> str:
        return f"{self.devices:,} devices, {self.tasks:,} selected, {self.update}"


def federation_of(case: FleetCase, port: int) -> Federation:
    """Return the server's federation; the broker listens on ``port``."""
    tables: dict[str, Any] = {
        "federation": {"name": NAME, "rounds": case.rounds + case.uncounted},
        "algorithm": _ECHO,
        "round": {
            "evaluate_every": 0,
            "min_devices": case.devices,
            "min_reports": 1,
            "fraction": case.tasks / case.devices,
        },
        "tiers": {TIER: {"cut": 0, "count": 1, "devices": [f"{TIER}-*"]}},
        "broker": {"kind": "external", "port": port},
        "limits": {"round_deadline_s": case.deadline_s, "ready_timeout_s": 3600.0},
        **UPDATES[case.update],
    }
    if case.workers > 1:
        tables["server"] = {"workers": case.workers}
    return completed(parse(tables, source="the benchmark"))


class MeasuredProcess:
    """A process with its children: processor seconds, and bytes of memory."""

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
        """Return the resident set sizes together, without the process that composed the run."""
        return resident_bytes(self._staying())

    def forget_peak(self) -> None:
        """Reset the highest resident set size (Linux)."""
        for each in self._all():
            with suppress(OSError):
                Path(f"/proc/{each.pid}/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the highest resident set sizes since :meth:`forget_peak`, together."""
        return sum(status_bytes("VmHWM", each.pid) for each in self._staying())

    def _staying(self) -> list[psutil.Process]:
        """Return all processes except the one that composed the run, which is not used again."""
        staying = []
        for each in self._all():
            with suppress(psutil.Error):
                if not any(INSIDE in word for word in each.cmdline()):
                    staying.append(each)
        return staying

    def _all(self) -> list[psutil.Process]:
        return family(self.process.pid)


@contextmanager
def running_broker(port: int, folder: Path) -> Iterator[MeasuredProcess]:
    """Run Mosquitto with the configuration that edgefl ships, and its counters each second."""
    folder.mkdir(parents=True, exist_ok=True)
    command = mosquitto_command(port, folder)
    with (folder / "mosquitto.conf").open("a", encoding="utf-8") as config:
        config.write("sys_interval 1\n")
    with (
        (folder / "log").open("wb") as log,
        child_process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        yield MeasuredProcess(process)


@contextmanager
def running_server(case: FleetCase, port: int, folder: Path) -> Iterator[MeasuredProcess]:
    """Run `edgefl server --json`; its standard output is a non-blocking pipe."""
    config = folder / "federation.toml"
    write_text(config, dump(federation_of(case, port)))
    command = module_command("edgefl", "server", "--config", str(config))
    command += ["--out", str(folder / "run"), "--json", "--broker", f"127.0.0.1:{port}"]
    command += ["--sign-key", str(folder / "signing.key")]
    environment = {**os.environ, **quiet_environment(), PARENT: str(os.getpid())}
    with (
        (folder / "server-log").open("wb") as log,
        child_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        yield MeasuredProcess(process)


def ended_early(log: Path, what: str) -> EdgeflError:
    """Return an error with the last line of a process that ended too early."""
    text = log.read_text(errors="replace") if log.exists() else ""
    last = last_line(text, "no output").removeprefix("error: ")
    return EdgeflError(f"the {what} ended during the measurement: {last}")
