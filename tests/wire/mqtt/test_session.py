"""The broker session against a real Mosquitto: what breaks, mends itself."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest

from edgefl.lab.broker import free_port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Disconnected, IncomingMessage, Wakeup, Will
from edgefl.wire.mqtt.session import Session
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory, on_each_broker
from tests.wire.mqtt.events import cut, hear, wait_for, wait_message, wait_up

# -- messages --------------------------------------------------------------------------------------------------


@on_each_broker
def test_messages_arrive_in_order(broker: BrokerProcess, connect: SessionFactory, federation: str) -> None:
    reader, writer = connect(broker.address), connect(broker.address)
    wait_up(reader)
    reader.subscribe([f"{federation}/#"])
    reader.publish(f"{federation}/warm", b"!")
    wait_message(reader, f"{federation}/warm")  # subscribed before this: what comes later comes in order
    for index in range(200):
        writer.publish(f"{federation}/{index}", bytes([index]), retain=True)

    found = [wait_for(reader, IncomingMessage) for _ in range(200)]

    assert [event.topic for event in found] == [f"{federation}/{index}" for index in range(200)]
    assert [event.payload for event in found] == [bytes([index]) for index in range(200)]
    assert reader.received_bytes == 201
    assert writer.sent_bytes == 200


@on_each_broker
def test_subscriptions_go_in_batches(broker: BrokerProcess, connect: SessionFactory, federation: str) -> None:
    writer, reader = connect(broker.address), connect(broker.address)
    topics = [f"{federation}/{index}" for index in range(50)]
    wait_up(writer)
    wait_up(reader)
    for topic in topics:
        assert writer.publish(topic, topic.encode(), retain=True).wait(60.0)

    reader.subscribe(topics, qos=0, standing=False)

    assert {wait_for(reader, IncomingMessage).topic for _ in topics} == set(topics)


@on_each_broker
def test_unsubscribed_topics_are_silent(
    broker: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    reader = connect(broker.address)
    wait_up(reader)
    reader.subscribe([f"{federation}/a", f"{federation}/b"])
    reader.unsubscribe([f"{federation}/a"])
    writer = connect(broker.address)
    reader.publish(f"{federation}/b", b"subscribed and unsubscribed before this")
    wait_message(reader, f"{federation}/b")

    writer.publish(f"{federation}/a", b"unwanted")
    writer.publish(f"{federation}/b", b"wanted")

    assert wait_for(reader, IncomingMessage).payload == b"wanted"


@on_each_broker
def test_a_delivery_waits_for_the_broker(
    broker: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    session = connect(broker.address)
    wait_up(session)

    delivery = session.publish(f"{federation}/x", b"1")

    assert delivery.wait(60.0)
    assert delivery.done()


@on_each_broker
def test_offline_messages_arrive_later(
    broker: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    reader = connect(broker.address)
    hear(reader, f"{federation}/x")
    writer = connect(broker.address, start=False)
    delivery = writer.publish(f"{federation}/x", b"written offline")
    assert not delivery.done()

    writer.start()

    assert wait_message(reader, f"{federation}/x") == b"written offline"
    assert delivery.wait(60.0)


# -- sessions --------------------------------------------------------------------------------------------------


@on_each_broker
def test_a_session_keeps_messages(broker: BrokerProcess, connect: SessionFactory, federation: str) -> None:
    topic = f"{federation}/tasks"
    first = connect(broker.address, federation)
    assert not hear(first, topic).resumed
    first.stop()
    writer = connect(broker.address)
    assert writer.publish(topic, b"while you were away").wait(60.0)

    second = connect(broker.address, federation)

    assert wait_up(second).resumed
    assert wait_message(second, topic) == b"while you were away"


def test_a_resumed_session_reads_all(mosquitto: Mosquitto, connect: SessionFactory, federation: str) -> None:
    topic = f"{federation}/rounds/current"
    first = connect(mosquitto.address, federation)
    hear(first, topic, b"round 1", retain=True)
    first.stop()

    second = connect(mosquitto.address, federation, start=False)
    second.subscribe([topic])
    second.start()

    assert wait_up(second).resumed
    assert wait_message(second, topic) == b"round 1"


def test_a_resumed_session_may_grow(mosquitto: Mosquitto, connect: SessionFactory, federation: str) -> None:
    first = connect(mosquitto.address, federation)
    wait_up(first)
    first.stop()

    second = connect(mosquitto.address, federation, start=False)
    second.subscribe([f"{federation}/acks"])
    second.start()
    assert wait_up(second).resumed
    second.publish(f"{federation}/acks", b"heard")

    assert wait_message(second, f"{federation}/acks") == b"heard"


def test_subscriptions_outlive_a_killed_broker(own_mosquitto: Mosquitto, connect: SessionFactory) -> None:
    session = connect(own_mosquitto.address, "phone")
    session.subscribe(["a/standing"])
    wait_up(session)
    session.subscribe(["a/later"])
    session.publish("a/later", b"1", retain=True)
    wait_message(session, "a/later")

    own_mosquitto.kill()
    down = wait_for(session, Disconnected)
    own_mosquitto.start()

    assert f"the broker at {own_mosquitto.address}" in down.reason
    assert not wait_up(session).resumed
    for topic in ("a/standing", "a/later"):
        session.publish(topic, b"2")
        assert wait_message(session, topic) == b"2"


def test_messages_wait_for_a_killed_broker(own_mosquitto: Mosquitto, connect: SessionFactory) -> None:
    session = connect(own_mosquitto.address, "phone")
    session.subscribe(["a/x"])
    wait_up(session)
    own_mosquitto.kill()
    wait_for(session, Disconnected)
    delivery = session.publish("a/x", b"kept")

    own_mosquitto.start()

    assert delivery.wait(300.0)
    wait_up(session)


@on_each_broker
def test_the_will_is_said_and_retained(
    broker: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    topic = f"{federation}/status"
    watcher = connect(broker.address)
    hear(watcher, topic, b"online", retain=True)
    dying = connect(broker.address, will=Will(topic, b"offline"))
    wait_up(dying)

    cut(dying, for_good=True)

    assert wait_message(watcher, topic) == b"offline"
    late = connect(broker.address)
    late.subscribe([topic])
    assert wait_message(late, topic) == b"offline"


@on_each_broker
def test_a_stopped_client_leaves_no_will(
    broker: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    topic = f"{federation}/status"
    watcher = connect(broker.address)
    watcher.subscribe([topic])
    wait_up(watcher)
    leaving = connect(broker.address, federation, will=Will(topic, b"will"))
    wait_up(leaving)

    leaving.stop()
    again = connect(broker.address, federation)  # had the old connection lived, the broker would end it now
    wait_up(again)
    watcher.publish(topic, b"nothing before this")

    assert wait_message(watcher, topic) == b"nothing before this"
    assert leaving._client.socket() is None


def test_stopping_what_was_never_started_is_harmless(limits: Limits) -> None:
    Session(Address("127.0.0.1", 1), "x", limits=limits).stop()


def test_stop_returns_while_the_broker_is_away(connect: SessionFactory) -> None:
    session = connect(Address("127.0.0.1", free_port()))
    wait_for(session, Disconnected)

    session.stop()

    assert not any(thread.name == session._thread.name for thread in threading.enumerate())


# -- reconnecting ----------------------------------------------------------------------------------------------


def test_pauses_double_up_to_the_maximum_and_are_jittered_downwards(connect: SessionFactory) -> None:
    limits = Limits(reconnect_min_s=0.01, reconnect_max_s=0.06)
    rng = Mock(spec=Random, random=Mock(side_effect=[1.0, 1.0, 1.0, 1.0, 0.0, 0.5, *[1.0] * 100]))
    session = connect(Address("127.0.0.1", free_port()), limits=limits, rng=rng)

    pauses = [wait_for(session, Disconnected).retry_s for _ in range(6)]

    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.06, 0.03, 0.045])


def test_an_unreachable_broker_is_named_with_the_reason(connect: SessionFactory) -> None:
    address = Address("127.0.0.1", free_port())
    down = wait_for(connect(address), Disconnected)

    assert down.reason.startswith(f"cannot reach the broker at {address}: ")
    assert down.reason.endswith("refused; does a broker run there, and listen on this port?")


def test_a_host_name_that_cannot_exist_is_retried_and_ends_nothing(connect: SessionFactory) -> None:
    session = connect(Address("a" * 70 + ".invalid", 1883))

    assert wait_for(session, Disconnected)
    assert wait_for(session, Disconnected)


def test_a_refused_password_is_reported_once_per_attempt(connect: SessionFactory, tmp_path: Path) -> None:
    with Mosquitto(tmp_path, allow_anonymous=False) as broker:
        session = connect(broker.address)
        reasons = [wait_for(session, Disconnected).reason for _ in range(2)]
        known = connect(replace(broker.address, username="pi-1", password="s3cret"))
        wrong = wait_for(known, Disconnected).reason

    remedy = (
        "name it as user@host:port (`--broker`), its password by `--password-file` or EDGEFL_BROKER_PASSWORD"
    )
    assert all(
        reason.endswith(f"refused us: Not authorized; it wants a user: {remedy}") for reason in reasons
    )
    assert wrong.endswith(f"it does not take user 'pi-1' with this password: {remedy}")
    assert "s3cret" not in wrong


def test_a_port_that_ends_the_connection_at_once_may_want_tls(connect: SessionFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = connect(Address("127.0.0.1", listener.getsockname()[1]))
        for _ in range(2):  # it asks in MQTT 5, and in 3.1.1
            listener.accept()[0].close()
        reason = wait_for(session, Disconnected).reason
    assert "ended the connection before it answered; does it want TLS (mqtts://, or `--ca-file`)" in reason
    assert "`max_connections`" in reason


@pytest.mark.parametrize(
    ("answer", "name"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "HTTP"), (b"SSH-2.0-x\r\n", "SSH"), (b"220 mail\r\n", "'220 mail")],
)
def test_a_port_that_speaks_something_else_is_named(
    connect: SessionFactory, answer: bytes, name: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = connect(Address("127.0.0.1", listener.getsockname()[1]))
        with listener.accept()[0] as accepted:
            accepted.sendall(answer)
            reason = wait_for(session, Disconnected).reason
    assert reason.startswith("no MQTT broker listens at 127.0.0.1") and f"answers {name}" in reason


def test_a_port_that_says_nothing_is_named(connect: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.wire.mqtt.session._SILENT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = connect(Address("127.0.0.1", listener.getsockname()[1]))
        with listener.accept()[0]:
            reason = wait_for(session, Disconnected).reason
    assert "accepts connections and says nothing; does an MQTT broker listen there" in reason


def test_a_wake_is_an_event_for_whoever_waits_even_without_a_broker(limits: Limits) -> None:
    session = Session(Address("127.0.0.1", free_port()), "woken", limits=limits)
    session.wake()
    assert session.inbox.get(timeout=300.0) == Wakeup()
