"""Commands in this process, as a shell would run them, and whole federations in it: what needs no process of its own."""

from __future__ import annotations

import io
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgefl import cli
from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.errors import EdgeflError
from edgefl.lab.lab import Lab
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.wire.mqtt.address import Address
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, AgentEvent, DeviceLog
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_server.compose import compose
from edgefl_server.events import Event, RoundClosed
from tests.e2e.runs import EDGEFL
from tests.server.fleet import RunningServer
from tests.support.commands import run_command

PATIENCE_S = 600.0
_HANDLED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ran:
    """A finished command, like :class:`subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str

    def events(self) -> list[dict[str, Any]]:
        """What it said as JSON lines."""
        return [json.loads(line) for line in self.stdout.splitlines()]


def edgefl(*arguments: str | Path) -> Ran:
    """``edgefl`` with these arguments, up to its exit code; the signal handlers it sets are taken back."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        with (
            redirect_stdout(stdout),
            redirect_stderr(stderr),
            patch.object(sys, "argv", ["edgefl", *map(str, arguments)]),
        ):
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ran(code, stdout.getvalue(), stderr.getvalue())


@dataclass(frozen=True)
class Trained:
    """A federation that was trained in this process. ``events``: all that its server told."""

    folder: Path
    rounds: list[RoundClosed]
    events: list[Event]

    @property
    def outcomes(self) -> list[tuple[str, int, int]]:
        """(outcome, reports, refused updates) of each round."""
        return [(closed.outcome, closed.reports, closed.rejected) for closed in self.rounds]


Engines = Callable[[Federation, Dataset], Mapping[str, Engine]]
"""What the devices of each tier run graphs with."""


def _those_of_the_file(federation: Federation, _: Dataset) -> Mapping[str, Engine]:
    return {name: open_engine(table.engine) for name, table in federation.tiers.items()}


def train(
    folder: Path,
    config: str,
    broker: Address,
    federation: str,
    rounds: int,
    engines: Engines = _those_of_the_file,
    hear: Callable[[Event], None] = lambda _: None,
) -> Trained:
    """The run of ``config``, with its server and its devices in threads and ``broker`` between them. ``hear`` is told what
    happens as it does: the server waits for it."""
    file = folder.with_suffix(".toml")
    file.write_text(config)
    told: dict[str, object] = {
        "federation.name": federation,
        "federation.rounds": rounds,
        "federation.seed": 7,
    }
    settings = completed(load(file, told))
    folder.mkdir()
    dataset, lab = open_data(settings), Lab(settings, folder)
    lab.prepare(dataset, partition(settings, dataset, len(lab.devices)))
    plan, opened = compose(settings, dataset, folder, device="cpu"), engines(settings, dataset)
    with ExitStack() as stack:
        server = RunningServer.start(plan, broker, folder, hear=hear, device="cpu")
        stack.callback(server.service.stop)
        devices = [
            RunningDevice.start(
                AgentConfig(
                    federation=federation,
                    device=name,
                    broker=broker,
                    data=folder / "devices" / name / "data.npz",
                    folder=folder / "devices" / name / "store",
                    tier="",
                    memory_bytes=0,
                    until_done=True,
                    limits=settings.wire_limits,
                ),
                opened[name.rpartition("-")[0]],
            )
            for name in lab.devices
        ]
        for device in devices:
            stack.callback(device.agent.stop)
        server.join()
        for device in devices:
            device.join()
    return Trained(folder, server.seen_of(RoundClosed), server.seen)


@dataclass
class RunningDevice:
    """An agent in a thread of its own, and the events that it logged."""

    agent: DeviceAgent
    events: queue.SimpleQueue[AgentEvent]
    thread: threading.Thread

    @classmethod
    def start(cls, config: AgentConfig, engine: Engine) -> RunningDevice:
        events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        agent = DeviceAgent(config, engine, DeviceLog(events.put))
        thread = threading.Thread(target=agent.run, daemon=True)
        thread.start()
        return cls(agent, events, thread)

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the device should have ended with the federation"


def lines(events: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The events of one name."""
    return [event for event in events if event["event"] == name]


def refused(ran: Ran | subprocess.CompletedProcess[str], kind: type[EdgeflError], *words: str) -> None:
    assert ran.returncode == kind.exit_code, ran.stderr
    assert "Traceback" not in ran.stderr
    for word in words:
        assert word in ran.stderr, ran.stderr


def in_a_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(*EDGEFL, *arguments)
