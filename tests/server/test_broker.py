"""The embedded broker, as a process of its own: what plain amqtt gets wrong, and what edgefl needs of any broker."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.lab.broker import free_port
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import IncomingMessage, Will
from edgefl.wire.mqtt.session import Session
from edgefl_server.broker import check_port, mosquitto_command
from edgefl_server.embedded_broker import QUEUE_BYTES, LeanBroker, _MessageMemory, _Queue, run_amqtt
from tests import needs
from tests.server.fleet import PATIENCE_S
from tests.support.errors import BrokerError, refuses
from tests.wire.mqtt.events import cut, wait_for, wait_up

Connect = Callable[..., Session]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broker") / "log"


@pytest.fixture(scope="module")
def amqtt(log: Path) -> Iterator[Address]:
    port = free_port()
    code = f"from edgefl_server.embedded_broker import run_amqtt; run_amqtt('127.0.0.1', {port})"
    with log.open("wb") as written:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=written)
    wait_listening(port)
    yield Address("127.0.0.1", port)
    process.terminate()
    process.wait(60)


def wait_listening(port: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the broker does not listen"
            time.sleep(0.02)


def received(session: Session, count: int) -> list[tuple[str, bytes]]:
    """Return the next ``count`` messages."""
    found = [wait_for(session, IncomingMessage) for _ in range(count)]
    return [(event.topic, event.payload) for event in found]


def test_a_client_that_asks_for_mqtt_5_causes_no_warning(amqtt: Address, connect: Connect, log: Path) -> None:
    wait_up(connect(amqtt))

    assert "MQTT 5" not in log.read_text()


def test_retained_chunks_arrive_once_per_subscription(amqtt: Address, connect: Connect) -> None:
    sender, receiver = connect(amqtt), connect(amqtt)
    chunks = {f"t1/blobs/{n}": bytes([n]) * 60_000 for n in range(20)}
    for topic, data in chunks.items():
        sender.publish(topic, data, retain=True).wait(PATIENCE_S)
    receiver.subscribe(chunks)
    assert sorted(received(receiver, 20)) == sorted(chunks.items())


def test_a_reconnecting_client_gets_its_own_retained_messages_only(amqtt: Address, connect: Connect) -> None:
    sender, other, own = connect(amqtt), connect(amqtt), connect(amqtt, "t2-own")
    for topic in ("t2/mine", "t2/theirs"):
        sender.publish(topic, b"kept", retain=True).wait(PATIENCE_S)
    other.subscribe(["t2/theirs"])
    own.subscribe(["t2/mine"])
    assert received(other, 1) and received(own, 1) == [("t2/mine", b"kept")]
    cut(own)
    wait_up(own)
    assert received(own, 1) == [("t2/mine", b"kept")]
    own.subscribe(["t2/last"])
    sender.publish("t2/last", b"live", retain=True)
    assert received(own, 1) == [("t2/last", b"live")], "nothing of anybody else's came in between"


def test_cleared_chunks_are_gone(amqtt: Address, connect: Connect) -> None:
    sender, receiver = connect(amqtt), connect(amqtt)
    sender.publish("t3/blobs/0", b"old", retain=True)
    sender.publish("t3/blobs/0", b"", retain=True)
    sender.subscribe(["t3/blobs/1"])
    sender.publish("t3/blobs/1", b"new", retain=True)
    assert received(sender, 1) == [("t3/blobs/1", b"new")], "the broker is done with it"
    receiver.subscribe(["t3/blobs/0", "t3/blobs/1"])
    assert received(receiver, 1) == [("t3/blobs/1", b"new")]


def test_wildcards_and_will(amqtt: Address, connect: Connect) -> None:
    watcher = connect(amqtt)
    watcher.subscribe(["t4/devices/+/status", "t4/devices/+/updates/#"])
    wait_up(watcher)
    device = connect(amqtt, will=Will("t4/devices/a/status", b"offline"))
    device.publish("t4/devices/a/updates/1/0", b"chunk")
    device.publish("t4/devices/a/acks", b"not for the watcher")
    device.publish("t4/devices/a/status", b"online")
    assert sorted(received(watcher, 2)) == [
        ("t4/devices/a/status", b"online"),
        ("t4/devices/a/updates/1/0", b"chunk"),
    ]
    cut(device, for_good=True)
    assert received(watcher, 1) == [("t4/devices/a/status", b"offline")]


@pytest.mark.parametrize("clean", [False, True])
def test_a_client_takes_over_its_half_open_connection(amqtt: Address, connect: Connect, clean: bool) -> None:
    name = f"t5-{clean}"
    status, tasks = f"{name}/status", f"{name}/tasks"
    watcher = connect(amqtt)
    watcher.subscribe([status])
    wait_up(watcher)
    strings = [text.encode() for text in (name, status, "offline")]
    body = b"\x00\x04MQTT\x04" + bytes([0x2C | (2 if clean else 0), 0, 60])
    body += b"".join(len(text).to_bytes(2, "big") + text for text in strings)
    with socket.create_connection((amqtt.host, amqtt.port)) as half_open:
        half_open.sendall(bytes([0x10, len(body)]) + body)
        assert half_open.recv(4)[0] == 0x20
        device = connect(amqtt, name, will=Will(status, b"offline"))
        device.subscribe([tasks])
        device.publish(status, b"online", retain=True).wait(PATIENCE_S)
        assert received(watcher, 1) == [(status, b"online")]
        time.sleep(0.5)
        watcher.publish(tasks, b"task").wait(PATIENCE_S)
        assert received(device, 1) == [(tasks, b"task")]
        assert watcher.inbox.empty()


def handshake(address: Address, client_id: str, *, clean: bool) -> socket.socket:
    """Connect a client that acknowledges nothing."""
    name = client_id.encode()
    body = b"\x00\x04MQTT\x04" + bytes([2 if clean else 0, 0, 60]) + len(name).to_bytes(2, "big") + name
    client = socket.create_connection((address.host, address.port))
    client.sendall(bytes([0x10, len(body)]) + body)
    assert client.recv(4, socket.MSG_WAITALL)[0] == 0x20
    return client


def subscribe(client: socket.socket, topic: str) -> None:
    name = topic.encode()
    body = b"\x00\x01" + len(name).to_bytes(2, "big") + name + b"\x01"
    client.sendall(bytes([0x82, len(body)]) + body)
    assert client.recv(5, socket.MSG_WAITALL)[0] == 0x90


def test_an_offline_client_gets_its_messages_in_order(amqtt: Address, connect: Connect) -> None:
    sender = connect(amqtt)
    with handshake(amqtt, "t6-device", clean=False) as client:
        subscribe(client, "t6/tasks/#")
    sent = [(f"t6/tasks/{n}", bytes([n])) for n in range(9, 0, -1)]
    with handshake(amqtt, "t6-watcher", clean=True) as watcher:
        subscribe(watcher, "t6/tasks/#")
        for topic, data in sent:
            sender.publish(topic, data)
        assert len(watcher.recv(9 * 17, socket.MSG_WAITALL)) == 9 * 17

    time.sleep(1.1)  # plain amqtt forgets anonymous sessions each second
    back = connect(amqtt, "t6-device")
    sender.publish("t6/tasks/0", b"\x00")

    assert received(back, 10) == [*sent, ("t6/tasks/0", b"\x00")]


def test_an_unacknowledged_message_is_sent_again(amqtt: Address, connect: Connect) -> None:
    sender = connect(amqtt)
    with handshake(amqtt, "t7-device", clean=False) as client:
        subscribe(client, "t7/tasks")
        sender.publish("t7/tasks", b"task").wait(PATIENCE_S)
        assert client.recv(1)[0] == 0x32

    assert received(connect(amqtt, "t7-device"), 1) == [("t7/tasks", b"task")]


def test_a_clean_session_ends_with_its_connection(amqtt: Address, connect: Connect) -> None:
    sender = connect(amqtt)
    with handshake(amqtt, "t8-device", clean=True) as client:
        subscribe(client, "t8/tasks")
        client.sendall(b"\xe0\x00")
        assert client.recv(1) == b""
    sender.publish("t8/tasks", b"missed").wait(PATIENCE_S)

    device = connect(amqtt, "t8-device")
    wait_up(device)
    sender.publish("t8/tasks", b"to nobody").wait(PATIENCE_S)
    device.subscribe(["t8/last"])
    sender.publish("t8/last", b"last", retain=True)
    assert received(device, 1) == [("t8/last", b"last")]


def test_what_is_held_has_limits_for_a_queue_and_in_all() -> None:
    async def scenario() -> None:
        broker = LeanBroker({"listeners": {"default": {"type": "tcp", "bind": "127.0.0.1:1"}}, "plugins": {}})
        queues = [_Queue(broker._room) for _ in range(2)]
        for _ in range(3):
            queues[0].add("topic", bytes(QUEUE_BYTES // 2), 1)
        assert len(queues[0].messages) == 1

        broker._room = queues[1]._room = _MessageMemory(10_000)
        for number in range(20):
            await broker.retain_message(None, f"t/{number}", bytes(2000))
            queues[1].add("topic", bytes(2000), 1)
        assert (len(broker._retained_messages), len(queues[1].messages)) == (2, 1)
        assert len(queues[1].empty()) == 1
        for number in range(20):
            await broker.retain_message(None, f"t/{number}", b"")
            await broker.retain_message(None, "t/last", bytes(9000))
        assert [*broker._retained_messages] == ["t/last"]

    asyncio.run(scenario())


def test_filters_that_nobody_holds_are_forgotten() -> None:
    from amqtt.session import Session as AmqttSession

    async def scenario() -> tuple[Any, Any]:
        broker = LeanBroker({"listeners": {"default": {"type": "tcp", "bind": "127.0.0.1:1"}}, "plugins": {}})
        session = AmqttSession()
        session.client_id = "a"
        for topic in ("blobs/1", "devices/+/hello"):
            await broker.add_subscription((topic, 1), session)
        broker._del_subscription("blobs/1", session)
        await broker._del_all_subscriptions(session)
        return broker._subscriptions, broker._wildcards

    assert asyncio.run(scenario()) == ({}, {})


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for attempt in (
            lambda: run_amqtt("127.0.0.1", port),
            *([lambda: mosquitto_command(port, Path("/nonexistent"))] if needs.find("mosquitto") else []),
        ):
            with pytest.raises(BrokerError, match=f"port {port} on 127.0.0.1 is in use"):
                attempt()


def test_an_address_that_is_not_ours_is_named() -> None:
    with refuses(BrokerError, host="192.0.2.1", port=...):
        check_port("192.0.2.1", 1883)


def test_mosquitto_gets_a_configuration(tmp_path: Path) -> None:
    needs.require("mosquitto")
    port = free_port()
    command = mosquitto_command(port, tmp_path / "broker")
    assert command[1] == "-c" and f"listener {port} 127.0.0.1" in Path(command[2]).read_text()


def test_mosquitto_starts_again_if_its_memory_is_full_of_messages(tmp_path: Path, connect: Connect) -> None:
    needs.require("mosquitto")
    port = free_port()
    command = [sys.executable, "-m", "edgefl", "broker", "--broker-kind", "mosquitto", "--memory", "8MiB"]
    command += ["--port", str(port), "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "running" not in process.stderr.readline():
            pass
        attacker, honest = connect(Address("127.0.0.1", port)), connect(Address("127.0.0.1", port))
        wait_up(attacker)
        for number in range(80):
            attacker.publish(f"left/{number}", bytes(100_000), qos=0, retain=True)
        while "memory is full" not in process.stderr.readline():
            pass
        honest.subscribe(["left/0", "honest"])
        while honest.inbox.get(timeout=PATIENCE_S) != IncomingMessage("honest", b"here"):
            honest.publish("honest", b"here", qos=0)
        process.terminate()
        assert process.wait(60) == 0
