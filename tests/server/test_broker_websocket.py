"""MQTT over WebSocket at a broker for one machine: what browsers connect to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgefl.lab.broker import free_port
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl_server.broker import mosquitto_command
from edgefl_server.embedded_broker import run_amqtt
from tests import needs
from tests.support.errors import BrokerError, refuses

PATIENCE_S = 60.0


@pytest.fixture(scope="module", params=["amqtt", "mosquitto"])
def listeners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Address, Address]]:
    """A broker as `edgefl broker --websocket-port` runs it: its address over TCP, and that over WebSocket."""
    if request.param == "mosquitto":
        needs.require("mosquitto")
    port = free_port()
    websocket_port = free_port(other=port)
    command = [sys.executable, "-m", "edgefl", "broker", "--broker-kind", request.param, "--port", str(port)]
    command += ["--websocket-port", str(websocket_port), "--folder", str(tmp_path_factory.mktemp("broker"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert f"ws://127.0.0.1:{websocket_port}" in process.stdout.readline()
    yield Address("127.0.0.1", port), Address("127.0.0.1", websocket_port, path="/mqtt")
    process.terminate()
    process.wait(60)


def test_what_is_said_over_tcp_is_heard_over_websocket(
    listeners: tuple[Address, Address], connect: Callable[..., Session]
) -> None:
    over_tcp, browser = map(connect, listeners)
    payload = bytes(range(256)) * 512  # a whole chunk
    over_tcp.publish("w/blobs/0", payload, retain=True).wait(PATIENCE_S)
    browser.subscribe(["w/blobs/0", "w/tasks"])
    assert heard(browser) == ("w/blobs/0", payload)
    over_tcp.publish("w/tasks", b"for the browser")
    assert heard(browser) == ("w/tasks", b"for the browser")
    over_tcp.subscribe(["w/updates"])
    browser.publish("w/updates", payload)
    assert heard(over_tcp) == ("w/updates", payload)


def heard(session: Session) -> tuple[str, bytes]:
    while not isinstance(event := session.inbox.get(timeout=PATIENCE_S), IncomingMessage):
        pass
    return event.topic, event.payload


@pytest.mark.parametrize("kind", ["amqtt", "mosquitto"])
def test_one_port_twice_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "mosquitto":
        needs.require("mosquitto")
    port = free_port()
    with refuses(BrokerError, port=port):
        if kind == "amqtt":
            run_amqtt("127.0.0.1", port, port)
        else:
            mosquitto_command(port, tmp_path, websocket_port=port)


def test_a_websocket_for_others_than_this_machine_needs_passwords(tmp_path: Path) -> None:
    needs.require("mosquitto")
    with refuses(BrokerError, host="0.0.0.0"):
        mosquitto_command(port := free_port(), tmp_path, "0.0.0.0", free_port(other=port))
