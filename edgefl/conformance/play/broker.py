"""A real broker for the time of a campaign: Mosquitto where it is installed, else the embedded one."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from edgefl.lab.ports import free_port
from edgefl.system.files import write_text
from edgefl.system.processes import end_process
from edgefl.system.python import module_command
from edgefl.wire.errors import BrokerError
from edgefl.wire.mqtt.address import Address
from server.broker import mosquitto_base, mosquitto_program

_START_S = 20.0


class Broker:
    """Started when it is entered, ended when it is left. ``address`` is for MQTT over TCP; ``websocket_port`` is where it
    speaks through WebSocket, 0 where it cannot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.websocket_port = 0
        self.name = "mosquitto"

    @property
    def address(self) -> Address:
        """Address of MQTT over TCP."""
        return Address("127.0.0.1", self.port, mqtt="auto" if self.name == "mosquitto" else "3.1.1")

    def __enter__(self) -> Broker:
        try:
            command = self._mosquitto()
        except BrokerError:
            self.name = "amqtt"
            command = module_command("edgefl", "broker", "--kind", "amqtt", "--port", str(self.port))
        with (self._folder / "broker.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:  # nobody leaves what was not entered
            end_process(self._process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_process(self._process)

    def _mosquitto(self) -> list[str]:
        program = mosquitto_program()
        self.websocket_port = free_port()
        lines = ["allow_anonymous true", *mosquitto_base(), f"listener {self.port} 127.0.0.1"]
        lines += [f"listener {self.websocket_port} 127.0.0.1", "protocol websockets"]
        config = self._folder / "mosquitto.conf"
        write_text(config, "\n".join(lines) + "\n")
        return [program, "-c", str(config)]

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process is not None and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        log = (self._folder / "broker.log").read_text(errors="replace")[-300:]
        raise BrokerError(f"the broker ({self.name}) did not start on port {self.port}: {log}")
