"""Federation on one machine: broker, server and device agents as separate processes."""

from __future__ import annotations

import math
import os
import queue
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.config import Federation, load
from edgefl.config.tables import BrokerTable
from edgefl.config.text import changes, dump
from edgefl.errors import ConfigError, EdgeflError
from edgefl.lab.agents import PYTHON, WEB, command_of
from edgefl.lab.broker import free_port
from edgefl.lab.faults.injector import Injector
from edgefl.lab.faults.schedule import Schedule, check_targets
from edgefl.lab.processes import Supervisor
from edgefl.lab.run_folder import BROKER, CONFIG_NAME, PASSWORD, without_password
from edgefl.setup.data import own_data
from edgefl.setup.tiers import device_names
from edgefl.system.files import write_text
from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.address import Address
from edgefl.wire.statistics import StatisticsRequest

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset

_LAST_WORDS_S = 0.2
"""Wait for the remaining lines of an ended process."""

_LEFT_BY_A_RUN = (
    *(
        "devices",
        "bundles",
        "checkpoints",
        "published",
        "updates",
        "mirror",
        "logs",
        "broker",
        "clocks",
        "orders",
        "web",
        "tensorboard",
    ),
    *(
        "journal.sqlite*",
        "devices.sqlite*",
        "signing.key*",
        "history.jsonl",
        "audit.jsonl",
        "events*.jsonl",
        "model.safetensors",
        "processes.json*",
        "mlflow.json",
        f"{CONFIG_NAME}*",
    ),
)


@dataclass(frozen=True)
class Restart:
    """Event: a process ended with an error or was killed, and was started again."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} died and runs again"


@dataclass(frozen=True)
class ServerEvent:
    """One event of the server, decoded from JSON. The key ``event`` holds its type."""

    event: dict[str, Any]

    def __str__(self) -> str:
        fields = (
            f"{key} {value}"
            for key, value in self.event.items()
            if key != "event" and value not in (None, "", [])
        )
        return f"{self.event.get('event')}: {', '.join(fields)}"


def refuse_finished(folder: Path) -> None:
    """Raise ConfigError if the folder contains a finished run."""
    if (folder / "model.safetensors").exists():
        raise ConfigError(f"{folder} holds a finished run: use `fresh` or another `out`")


class Lab:
    """A run's folder and processes, and the events of its server.

    Args:
        federation: the federation.
        folder: folder of the run.
        environment: additional environment variables of all processes.
        policies: path of the policy file of a device's owner, by device (`edgefl device --policy`).
        agents: kind of agent by device (:mod:`edgefl.lab.agents`); Python's agent for all others.

    Raises:
        ConfigError: if an agent is not built, or browsers have no WebSocket broker.
    """

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        policies: Mapping[str, Path] | None = None,
        agents: Mapping[str, str] | None = None,
    ) -> None:
        self.federation = federation
        self.folder = folder
        self._policies = policies or {}
        self._agents = agents or {}
        self._commands = {kind: command_of(kind) for kind in {PYTHON, *self._agents.values()}}
        self.devices = device_names(federation)
        self._own_data = own_data(federation, self.devices)
        broker = federation.broker
        self._port = broker.port or (1883 if broker.kind == "external" else free_port())
        self._browsers = [name for name in self.devices if self._agents.get(name) == WEB]
        if self._browsers and broker.kind == "external" and not broker.path:
            raise ConfigError(
                f"browser agents ({', '.join(self._browsers)}) need a broker with WebSocket: give the external one's `path`"
                ', like path = "/mqtt", or let the run start its own broker'
            )
        self._websocket_port = (
            free_port(other=self._port) if self._browsers and broker.kind != "external" else 0
        )
        self.supervisor = Supervisor(folder, environment)
        self._injector: Injector | None = None
        self._happened = 0
        self._server_options: tuple[str, ...] = ()

    @property
    def address(self) -> Address:
        """Address of the broker, with the password."""
        return _address(self.federation.broker, self._port)

    @property
    def _key(self) -> Path:
        """Path of the server's private key, in the folder with the stores of devices that trust it."""
        return self.folder / "signing.key"

    @property
    def public_key(self) -> str:
        """Public key of the server. The key pair is created if it is missing."""
        return KeyPair(self._key).public_key

    def disturb(self, schedule: Schedule) -> None:
        """Prepare the injection of faults into this run. Call it before :meth:`start`.

        Args:
            schedule: the faults.

        Raises:
            ConfigError: if the run has no process of a fault's target.
        """
        broker = self.federation.broker
        check_targets(schedule, self.devices, broker=broker.kind != "external")
        address = broker.host, self._port
        elsewhere = dict.fromkeys(self._browsers, self._websocket_port) if self._websocket_port else {}
        self._injector = Injector(schedule, self.supervisor, self.devices, address, self.folder, elsewhere)

    @property
    def faults_happened(self) -> int:
        """Number of faults so far."""
        return self._injector.happened if self._injector is not None else self._happened

    def _environment(self, name: str) -> dict[str, str]:
        """Return environment variables for the process ``name``, by name: the broker's address, and settings of injected
        faults.

        The address may contain a password. So it is not passed as an argument or in a file, which others can read.
        """
        address = self.address
        if name in self._browsers and self._websocket_port:
            address = replace(address, port=self._websocket_port, path="/mqtt")
        if self._injector is None:
            return {BROKER: address.url}
        disturbed = replace(address, host="127.0.0.1", port=self._injector.ports[name])
        return {BROKER: disturbed.url, **self._injector.environment(name)}

    def prepare(
        self,
        dataset: Dataset,
        parts: list[Any],
        *,
        evaluate: bool = False,
        statistics: StatisticsRequest | None = None,
    ) -> None:
        """Write the configuration and the devices' data. An interrupted run with the same configuration is resumed.

        Args:
            dataset: the training samples.
            parts: rows of each device; unused for devices with own data.
            evaluate: add an evaluation round to a finished run.
            statistics: ask the devices for statistics of their data, and train nothing.

        Raises:
            ConfigError: if the folder holds a finished run, or one of another configuration.
        """
        path = self.folder / CONFIG_NAME
        wanted = without_password(self.federation)
        before = without_password(load(path)) if path.exists() else wanted
        if before.model_copy(update={"tracking": wanted.tracking}) != wanted:
            differ = "; ".join(changes(before, wanted, but={"broker", "tracking"})) or "another broker"
            raise ConfigError(
                f"{self.folder} holds a run with another configuration ({differ}): use `fresh` or another `out`"
            )
        self._server_options = ("--evaluate",) if evaluate else ()
        if statistics is not None:
            self._server_options = ("--statistics", msgspec.json.encode(statistics).decode())
        if not evaluate:
            refuse_finished(self.folder)
        spread = () if self._own_data else zip(self.devices, parts, strict=True)
        for name, rows in spread:
            target = self.data_of(name)
            if not target.exists():
                dataset.write_device(target, rows)
        write_text(path, dump(wanted))

    def start(self) -> None:
        """Start the broker (unless it is external), the server and the devices as processes."""
        broker, name = self.federation.broker, self.federation.federation.name
        if broker.kind != "external":
            arguments = ["--broker-kind", broker.kind, "--host", broker.host, "--port", str(self._port)]
            if self._websocket_port:
                arguments += ["--websocket-port", str(self._websocket_port)]
            self.supervisor.start("broker", ["broker", *arguments, "--folder", str(self.folder / "broker")])
        config = str(self.folder / CONFIG_NAME)
        key, public = self._key, self.public_key
        serving = ["server", "--config", config, "--out", str(self.folder), "--json", "--sign-key", str(key)]
        serving += self._server_options
        self.supervisor.start("server", serving, self._environment("server"))
        limits = [f"--limit={key}={value}" for key, value in self.federation.limits.items()]
        for device in self.devices:
            home = self.folder / "devices" / device
            arguments = ["--id", device, "--federation", name, "--data", str(self.data_of(device))]
            arguments += ["--store", str(home / "store"), "--until-done", "--json"]
            tier = self.federation.tiers[device.rpartition("-")[0]]
            arguments += ["--memory", f"{tier.memory_bytes}B"] if tier.memory_bytes else []
            arguments.append("--no-tune")  # the same seed gives the same bits, on a busy machine too
            arguments += ["--server-key", public, "--engine", tier.engine]
            if device in self._policies:
                arguments += ["--policy", str(self._policies[device])]
            command = self._commands[self._agents.get(device, PYTHON)]
            self.supervisor.start_program(device, [*command, *arguments, *limits], self._environment(device))

    def data_of(self, device: str) -> Path:
        """Return the path of a device's data: its own in ``data.devices_dir``, else its part of the dataset."""
        return self._own_data.get(device, self.folder / "devices" / device / "data.npz")

    def events(self, patience_s: float = math.inf) -> Iterator[ServerEvent | Restart]:
        """Yield the server's events, restarts of processes, and devices' refusals of their data, until the server is
        done.

        Processes that died are restarted meanwhile.

        Args:
            patience_s: limit of the whole run in seconds.

        Raises:
            EdgeflError: if a process cannot be restarted, after the server's remaining events. Also after
                ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while True:
            if time.monotonic() > deadline:
                raise EdgeflError(f"the run did not end in {patience_s:g} s; see {self.folder / 'logs'}")
            try:
                restarted = self.supervisor.check()
            except EdgeflError:
                time.sleep(_LAST_WORDS_S)
                yield from (ServerEvent(event) for name, event in self.lines(0) if name == "server")
                raise
            for name in restarted:
                yield Restart(name)
            line = self._line(0.1)
            if line is None:
                if self.supervisor.is_done("server"):
                    return
                continue
            name, event = line
            if name == "server" and event:
                if self._injector is not None:
                    self._injector.observe(event)
                yield ServerEvent(event)
            elif name in self.devices and event.get("event") == "data":
                # A device sends the server a code alone. Only its own process says which row it refuses.
                yield ServerEvent({"event": "warned", "text": f"{name} refuses its data: {event['text']}"})

    def lines(self, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (process name, JSON event) for all unread events of all processes. Wait up to ``timeout_s`` for the
        first.
        """
        line = self._line(timeout_s)
        while line is not None:
            if line[1]:
                yield line
            line = self._line(0)

    def _line(self, timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        """Return (process name, event) of the next line of output, or None on timeout.

        For a line that is not JSON it is ("", {}).
        """
        try:
            name, line = self.supervisor.lines.get(timeout=timeout_s)
            event = msgspec.json.decode(line)
            return name, event if isinstance(event, dict) else {}
        except queue.Empty:
            return None
        except msgspec.DecodeError:
            return "", {}

    def finish(self) -> None:
        """Wait up to 10 seconds for the devices to end, then stop all processes."""
        self.supervisor.wait(self.devices, timeout_s=10.0)
        self.stop()

    def stop(self) -> None:
        """End all faults and stop all processes."""
        if self._injector is not None:
            self._injector.stop()
            self._happened = self._injector.happened
            self._injector = None
        self.supervisor.stop()


def _address(broker: BrokerTable, port: int) -> Address:
    """Return the broker's address, with the password from the environment if the file has none."""
    address = broker.address(port)
    if broker.kind == "amqtt":
        address = replace(address, mqtt="3.1.1")  # it has no other, and would say so to each connection
    if address.username and not address.password:
        address = replace(address, password=_find_password(broker))
    address.check()
    return address


def _find_password(broker: BrokerTable) -> str:
    """Return the broker's password from the environment; "" if there is none.

    It is in a variable of its own, or in an address with the same user, host and port as ``broker``.
    """
    if alone := os.environ.get(PASSWORD, ""):
        return alone
    if not (named := os.environ.get(BROKER, "")):
        return ""
    given = Address.parse(named)
    same = (given.username, given.host, given.port) == (broker.username, broker.host, broker.port)
    return given.password if same else ""


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if ``folder`` contains files but no run, so that files of others are never deleted."""
    if (folder / CONFIG_NAME).exists() or not folder.exists():
        return
    if any(child.suffix != ".lock" for child in folder.iterdir()):
        raise ConfigError(
            f"{folder} is not the folder of a run (no {CONFIG_NAME}); it is left alone, use another `out`"
        )


def discard(folder: Path) -> None:
    """Delete the files of an earlier run in ``folder``. Other files stay.

    Raises:
        ConfigError: if the folder contains files but no run.
    """
    refuse_foreign(folder)
    for name in _LEFT_BY_A_RUN:
        for path in folder.glob(name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
