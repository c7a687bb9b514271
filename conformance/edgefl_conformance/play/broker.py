"""Broker of a campaign: Mosquitto if it is installed, otherwise the embedded one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import BrokerError
from edgefl.lab.broker import free_port, listens
from edgefl.system.processes import child_process, module_command
from edgefl.wire.mqtt.address import Address
from edgefl_server.broker import mosquitto_command

_START_S = 20.0


@dataclass(frozen=True)
class Broker:
    """Ports of a running broker: ``port`` for MQTT over TCP, ``websocket_port`` for WebSocket, 0 without that."""

    name: str
    port: int
    websocket_port: int = 0

    @property
    def address(self) -> Address:
        """Address of MQTT over TCP."""
        return Address("127.0.0.1", self.port, mqtt="auto" if self.name == "mosquitto" else "3.1.1")


@contextmanager
def running_broker(folder: Path) -> Iterator[Broker]:
    """Run a broker while the block runs. Raises BrokerError if it does not start."""
    port = free_port()
    broker = Broker("mosquitto", port, free_port(other=port))
    try:
        command = mosquitto_command(broker.port, folder, websocket_port=broker.websocket_port)
    except BrokerError:
        broker = Broker("amqtt", broker.port)
        command = module_command("edgefl", "broker", "--broker-kind", "amqtt", "--port", str(broker.port))
    output = folder / "broker.log"
    with (
        output.open("wb") as log,
        child_process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        if not listens(broker.port, process, _START_S):
            last = output.read_text(errors="replace")[-300:]
            raise BrokerError(f"the broker ({broker.name}) did not start on port {broker.port}: {last}")
        yield broker
