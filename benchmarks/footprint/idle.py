"""Client processes that are connected and have nothing to do: how soon they were, and what they hold in memory."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common.machine import import_path, quiet_environment
from edgefl.errors import EdgeflError
from edgefl.lab.broker import free_port, lab_broker, listens
from edgefl.system.processes import end_process, last_line
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Connected, Event, IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics

HOST, FEDERATION, SAMPLES = "127.0.0.1", "bench-footprint", 32
PATIENCE_S = 60.0
SETTLE_S = 5.0
"""What a client does when it is connected is over by then: it waits."""


@dataclass(frozen=True)
class Idle:
    """One client. ``ready_s``: from the start of its process until the other side has heard of it. Bytes: resident memory
    of the process and its children, and the part of it that is no file's contents."""

    ready_s: float
    idle_rss_bytes: int
    idle_anonymous_bytes: int


def agents(command: Sequence[str], engine: str, repeat: int) -> Iterator[Idle]:
    """An agent that takes the options of `edgefl device`, against a real broker, which has its hello; its subscriptions went
    out before."""
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        port = stack.enter_context(lab_broker(folder, PATIENCE_S))
        generator = np.random.default_rng(0)
        x = generator.standard_normal((SAMPLES, 3, 32, 32), np.float32)
        np.savez(folder / "data.npz", x=x, y=generator.integers(0, 10, SAMPLES))
        topics = Topics(FEDERATION)
        hellos = {f"device-{number}": topics.device(f"device-{number}").hello for number in range(repeat)}
        with _ear(port, list(hellos.values())) as heard:
            for device, hello in hellos.items():
                options = ["--id", device, "--federation", FEDERATION, "--broker", f"{HOST}:{port}"]
                options += ["--data", str(folder / "data.npz"), "--store", str(folder / device)]
                yield _started([*command, *options, "--engine", engine], heard, hello)


def device_command(python: str) -> list[str]:
    """Return the command of ``edgefl device`` in the environment of an interpreter."""
    return [python, "-m", "edgefl", "device"]


def flower_clients(python: str, repeat: int) -> Iterator[Idle]:
    """A Flower client with torch against a Flower server, which counts it among its clients."""
    module = [python, "-m", "benchmarks.footprint.flower"]
    with import_path() as path:
        environment = {"PYTHONPATH": str(path)}
        for _ in range(repeat):
            port = free_port(HOST)
            with _process([*module, "server", str(port)], environment) as (server, output):
                if not listens(port, server, PATIENCE_S):
                    raise _Silent
                yield _started([*module, "client", str(port)], output, "connected", environment)


def _started(
    command: Sequence[str], heard: queue.Queue[str], ready: str, environment: Mapping[str, str] | None = None
) -> Idle:
    """The client of ``command``, which is ready when ``ready`` is heard."""
    began = time.perf_counter()
    with _process(command, environment) as (process, _):
        _until(heard, ready)
        seconds = time.perf_counter() - began
        time.sleep(SETTLE_S)
        if process.poll() is not None:
            raise EdgeflError(
                f"a client ended as soon as it was connected, with exit code {process.returncode}"
            )
        client = psutil.Process(process.pid)
        usages = [each.memory_full_info() for each in (client, *client.children(recursive=True))]
    return Idle(
        seconds,
        sum(each.rss for each in usages),
        sum(each.rss - each.shared for each in usages),
    )


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str]]]:
    """A process and the lines it writes; ended by the end of the block."""
    output: queue.Queue[str] = queue.Queue()
    quiet = quiet_environment() | {"PYTHONUNBUFFERED": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **quiet, **(environment or {})},
        )
        threading.Thread(target=_listen, args=(process, output), daemon=True).start()
        try:
            yield process, output
        except _Silent as error:
            log.seek(0)
            why = last_line(log.read(), "it said nothing")
            raise EdgeflError(
                f"{' '.join(command[1:4])} was not ready within {PATIENCE_S:g} s: {why}"
            ) from error
        finally:
            end_process(process, 5.0)


class _Silent(Exception):
    """An expected event did not arrive in time."""


def _listen(process: subprocess.Popen[str], said: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put(line.strip())


def _until(heard: queue.Queue[str], wanted: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(queue.Empty):
        while heard.get(timeout=max(0.0, deadline - time.monotonic())) != wanted:
            pass
        return
    raise _Silent


class _Heard:
    """Topics of the messages of a session."""

    def __init__(self) -> None:
        self.topics: queue.Queue[str] = queue.Queue()
        self.connected = threading.Event()

    def put(self, event: Event) -> None:
        if isinstance(event, Connected):
            self.connected.set()
        elif isinstance(event, IncomingMessage):
            self.topics.put(event.topic)


@contextlib.contextmanager
def _ear(port: int, topics: Sequence[str]) -> Iterator[queue.Queue[str]]:
    """The topics of messages on ``topics``, as they come in."""
    heard = _Heard()
    session = Session(Address(HOST, port), f"{FEDERATION}-ear", limits=Limits(), events=heard)
    session.subscribe(topics)
    session.start()
    try:
        if not heard.connected.wait(PATIENCE_S):
            raise _Silent
        yield heard.topics
    finally:
        session.stop()
