"""``python -m benchmarks load``: many devices in one process, to measure a server and its broker.

::

    generator = LoadGenerator(LoadSettings(federation="demo", devices=1000), Address("localhost"))
    summary = generator.run()
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from benchmarks.load.connection import BrokerTarget, Loop, check_room
from benchmarks.load.device import GeneratedDevice
from benchmarks.load.settings import BehaviourShares, LoadCounts, LoadSettings, LoadSummary
from benchmarks.load.state import FleetState, Say
from benchmarks.options import ShareOfTasks, with_options
from edgefl.api.progress import reporting
from edgefl.cli.options import Broker, EngineChoice, PasswordFile, address, parse_bytes, parse_limits
from edgefl.cli.output import errors, print_json, print_table
from edgefl.errors import BrokerError
from edgefl.wire.mqtt.address import Address


@dataclass(frozen=True)
class LoadOptions:
    """Options of the command."""

    federation: Annotated[str, typer.Option(help="name of the federation")] = "demo"
    devices: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many connect")] = 100
    broker: Broker = "localhost:1883"
    password_file: PasswordFile = ""
    prefix: Annotated[str, typer.Option(help="prefix of their names, before a number")] = "load-"
    first: Annotated[int, typer.Option(min=0, help="the first number")] = 0
    seed: Annotated[str, typer.Option(help="decides keys and faults")] = "0"
    tier: Annotated[str, typer.Option(help="the tier that they ask for; default: the server decides")] = ""
    memory: Annotated[str, typer.Option(help="memory that each reports")] = "16GiB"
    samples: Annotated[int, typer.Option(min=1, help="samples that each reports")] = 100
    format: Annotated[EngineChoice, typer.Option(help="format of the bundles that they expect")] = (
        EngineChoice.onnx
    )
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch bundle and weights too")] = False
    train: Annotated[float, typer.Option(min=0, help="seconds from a task to its update")] = 0.0
    progress_rate: Annotated[
        float, typer.Option("--progress", min=0, max=5, help="messages a second while they train")
    ] = 0.0
    vanish: ShareOfTasks = 0.0
    late: ShareOfTasks = 0.0
    duplicate: ShareOfTasks = 0.0
    garbage: ShareOfTasks = 0.0
    away: Annotated[float, typer.Option(min=0, help="seconds until one that vanished is back")] = 30.0
    late_by: Annotated[
        float, typer.Option(min=0, help="seconds until a late update; 0: the deadline is over")
    ] = 0.0
    connecting: Annotated[int, typer.Option(min=1, help="how many connect at once")] = 64
    seconds: Annotated[float, typer.Option(min=0, help="how long; 0: until the training is done")] = 0.0
    limit: Annotated[list[str] | None, typer.Option(help="a limit as NAME=VALUE; may be repeated")] = None
    as_json: Annotated[bool, typer.Option("--json", help="the numbers as one JSON object")] = False

    def settings(self) -> LoadSettings:
        """Return the load. Raises ConfigError for values that cannot be."""
        return LoadSettings(
            federation=self.federation,
            devices=self.devices,
            prefix=self.prefix,
            first=self.first,
            seed=self.seed,
            tier=self.tier,
            memory_bytes=parse_bytes(self.memory, "--memory"),
            samples=self.samples,
            format=self.format.value,
            fetch=self.fetch,
            train_s=self.train,
            progress_s=self.progress_rate,
            connecting=self.connecting,
            away_s=self.away,
            late_s=self.late_by,
            shares=BehaviourShares(self.vanish, self.late, self.duplicate, self.garbage),
            limits=parse_limits(self.limit or []),
        )


@with_options(LoadOptions)
def load(options: LoadOptions) -> None:
    """Load a server with many devices that speak the protocol and train nothing.

    One process holds all of their connections. They sign with keys made of --seed and their names, accept tasks, and send
    valid updates of their tier with random numbers in them: never use this on a federation whose model you need. They fetch
    the manifest only, unless --fetch is given.

    --vanish, --late, --duplicate and --garbage are shares of the tasks, from 0 to 1, with a fault: the connection breaks and
    is back after --away seconds, the update arrives after the round's deadline, it arrives twice, or it is invalid.

    Examples:

      python -m benchmarks load --broker localhost:1883 --federation demo --devices 1000 --prefix strong-

      python -m benchmarks load --federation demo --devices 300 --vanish 0.1 --late 0.1 --garbage 0.1 --json
    """

    settings = options.settings()
    with reporting(f"making {settings.devices:,} keys") as say:
        broker = address(options.broker, password_file=options.password_file)
        generator = LoadGenerator(settings, broker, say=errors.print)
        generator.report_progress(say)
        summary = generator.run(options.seconds)
    if options.as_json:
        print_json(summary)
        return
    rows = msgspec.to_builtins(summary)
    print_table("load", [{"what": name.replace("_", " "), "value": value} for name, value in rows.items()])


class LoadGenerator:
    """All devices of one load.

    Args:
        load: number and behaviour of the devices.
        broker: address of the broker.
        loop: event loop; default: a new one.
        say: receives warnings and progress as text.
        hold: so many devices connect only after :meth:`release`.

    Raises:
        ConfigError: this process may not have so many connections.
        BrokerError: the address cannot be used.
    """

    def __init__(
        self,
        load: LoadSettings,
        broker: Address,
        *,
        loop: Loop | None = None,
        say: Say = lambda _: None,
        hold: int = 0,
    ) -> None:
        target = _target(broker)
        check_room(load.devices)
        self.load = load
        self.loop = loop or Loop()
        self.state = FleetState(load, target, self.loop, broker.client_ids, say)
        self._broker = broker
        self._devices = [GeneratedDevice(self.state, self, name) for name in load.names]
        self._held = self._devices[load.devices - hold :]
        self._next = deque(self._devices[: load.devices - hold])
        self._dialling: set[GeneratedDevice] = set()
        self._wanted = len(self._next)
        self._random = random.Random(load.seed)
        self._began = 0.0

        self._ever_up = False

    @property
    def counts(self) -> LoadCounts:
        """Counts of all devices so far."""
        return self.state.counts

    def begin(self) -> None:
        """Connect the devices, a few at a time; :meth:`run` does it too."""
        self._began = time.monotonic()
        self._dial()

    def run(self, seconds: float = 0.0) -> LoadSummary:
        """Run until the training is done, for so many seconds, or until Ctrl-C.

        Raises:
            BrokerError: no device can connect.
        """
        self.begin()
        if seconds:
            self.loop.later(seconds, self.loop.stop)
        try:
            with suppress(KeyboardInterrupt):
                self.loop.run()
            if self.state.error is not None:
                raise self.state.error
            summary = self.summary()
            for device in self._devices:
                device.leave()
        finally:
            self.close()
        return summary

    def release(self) -> None:
        """Connect the devices that were held back."""
        self._next.extend(self._held)
        self._wanted += len(self._held)
        self._held = []
        self._dial()

    def report_progress(self, say: Say) -> None:
        """Report the progress to ``say`` every second."""
        counts = self.counts
        say(
            f"{counts.up:,} of {self.load.devices:,} connected, {counts.tasks:,} tasks, {len(counts.ack_s):,} answered, "
            f"{counts.unanswered:,} wait"
        )
        self.loop.later(1.0, lambda: self.report_progress(say))

    def close(self) -> None:
        """Close all connections without DISCONNECT."""
        for device in self._devices:
            device.close()

    def summary(self) -> LoadSummary:
        """Return the counts so far as a summary."""
        return self.counts.summary(self.load.devices, time.monotonic() - self._began)

    def _dial(self) -> None:
        while self._next and len(self._dialling) < self.load.connecting:
            device = self._next.popleft()
            self._dialling.add(device)
            device.connect()

    def on_hello_sent(self, device: GeneratedDevice) -> None:
        """Count a device whose hello the broker has."""
        self._ever_up = True
        self.counts.up += 1
        self._dialling.discard(device)
        if self.counts.up == self._wanted and not self._next:
            self.counts.connect_s = self.counts.connect_s or time.monotonic() - self._began
        self._dial()

    def on_connection_lost(self, device: GeneratedDevice, reason: str, attempt: int) -> None:
        """Schedule the next attempt of a device to connect, with the protocol's backoff."""
        self.counts.drops += 1
        self._dialling.discard(device)
        if not self._ever_up:
            self.state.fail(
                BrokerError(
                    f"no device can connect to the broker at {self._broker}: {reason}; start it, or correct its address "
                    "and user",
                    address=str(self._broker),
                )
            )
            return
        self.state.warn(f"a connection ended: {reason}")
        limits = self.load.limits
        pause = min(limits.reconnect_max_s, limits.reconnect_min_s * 2.0 ** min(attempt, 16))
        self.loop.later(pause * (0.5 + 0.5 * self._random.random()), device.connect)
        self._dial()


def _target(broker: Address) -> BrokerTarget:
    """Resolve the broker's address. Raises BrokerError if it is unknown, or needs TLS or WebSocket."""
    if broker.secure or broker.path:
        raise BrokerError(
            f"the generator expects MQTT over plain TCP only, found {broker}; give the broker a plain listener for the "
            "measurement (`listener 1884 127.0.0.1`)",
            address=str(broker),
        )
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BrokerError(
            f"the broker's address {broker} cannot be found: {error}", address=str(broker)
        ) from error
    preferred = next((each for each in found if each[0] == socket.AF_INET), found[0])
    return BrokerTarget(int(preferred[0]), preferred[4], broker.username, broker.password)
