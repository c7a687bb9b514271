"""Brokers that edgefl does not start itself: aedes, and RabbitMQ with its MQTT plug-in. Both speak MQTT 3.1.1."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from edgefl.lab.broker import free_port
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
