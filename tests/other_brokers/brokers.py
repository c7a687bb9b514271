"""Brokers that edgefl does not start itself: aedes, and RabbitMQ with its MQTT plug-in. Both speak MQTT 3.1.1."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from edgefl.lab.broker import free_port
from edgefl.wire.mqtt.address import Address
from tests import needs
from tests.conftest import BrokerProcess

HERE = Path(__file__).parent
_RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's program behind the wrapper on the PATH, which runs it as a user of its own."""


class Aedes(BrokerProcess):
    """aedes from npm with its defaults.

    With ``exact`` it sends no retained messages to subscriptions with wildcards, as RabbitMQ does.
    """

    def __init__(self, folder: Path, *, exact: bool = False) -> None:
        super().__init__(folder)
        self._exact = exact

    def _command(self) -> list[str]:
        node = needs.require("node")
        needs.require_packages(HERE)
        return [node, str(HERE / "aedes.mjs"), str(self.port), *(["exact"] if self._exact else [])]


class RabbitMQ(BrokerProcess):
    """RabbitMQ with its MQTT plug-in: a node in ``folder`` with a port mapper of its own. Skips where it is missing."""

    def _command(self) -> list[str]:
        if not _RABBITMQ.exists():
            pytest.skip("rabbitmq-server is not installed: apt install rabbitmq-server")
        listeners = {"listeners": free_port(), "mqtt.listeners": self.port}
        lines = [f"{key}.tcp.1 = 127.0.0.1:{port}" for key, port in listeners.items()]
        (self._folder / "rabbitmq.conf").write_text("\n".join([*lines, "mqtt.allow_anonymous = true", ""]))
        (self._folder / "plugins").write_text("[rabbitmq_mqtt].\n")
        return ["sh", "-c", f"epmd & exec {_RABBITMQ}"]

    def _options(self) -> dict[str, Any]:
        folder = self._folder
        environment = {
            "HOME": folder,  # of the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": free_port(),
            "RABBITMQ_NODENAME": f"edgefl{self.port}@localhost",
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_MNESIA_BASE": folder / "data",
            "RABBITMQ_LOG_BASE": folder / "log",
            "RABBITMQ_PID_FILE": folder / "pid",
            "RABBITMQ_CONF_ENV_FILE": folder / "none",
            "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
        }
        return {
            "env": {**os.environ, **{key: str(value) for key, value in environment.items()}},
            "start_new_session": True,
        }

    def kill(self) -> None:
        """End the node, its shell and its port mapper."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    stop = kill


class ScriptedBroker:
    """Broker of one connection, which sends the retained message late, or hangs up at a subscription.

    Args:
        delays: seconds until the retained message is sent to each subscription in turn, whatever its filter is. At the
            first subscription without a delay it hangs up.
    """

    def __init__(self, *delays: float) -> None:
        self.published: list[bytes] = []
        self._delays = list(delays)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        client = self._listener.accept()[0]
        retained = b""
        with client, client.makefile("rb") as packets, suppress(OSError):
            while kind := packets.read(1):
                length = packets.read(1)[0]
                body = packets.read(length)
                match kind[0] >> 4:
                    case 1:
                        client.sendall(b"\x20\x02\0\0")
                    case 3:
                        topic_end = 2 + int.from_bytes(body[:2])
                        client.sendall(b"\x40\x02" + body[topic_end : topic_end + 2])
                        self.published.append(body[topic_end + 2 :])
                        retained = body[:topic_end] + body[topic_end + 2 :]
                    case 8 if not self._delays:
                        return
                    case 8:
                        client.sendall(b"\x90\x03" + body[:2] + b"\x01")
                        message = b"\x31" + bytes([len(retained)]) + retained
                        threading.Timer(self._delays.pop(0), self._send, (client, message)).start()

    @staticmethod
    def _send(client: socket.socket, message: bytes) -> None:
        with suppress(OSError):
            client.sendall(message)
