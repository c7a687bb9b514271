"""A link that breaks costs the server's connection, and not the whole model once more."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import Online, Waiting, Warned
from tests.conftest import BrokerProcess, SessionFactory
from tests.secure import SecureBroker
from tests.server.fleet import RunningServer, plan_for
from tests.wire.mqtt.events import wait_for, wait_message, wait_until, wait_up


def test_after_a_cut_nothing_is_published_again_that_the_broker_still_has(
    serve: Callable[..., RunningServer], mosquitto: BrokerProcess, connect: SessionFactory, federation: str
) -> None:
    server = serve()
    server.wait_for(Waiting)
    topics, watcher = Topics(federation), connect(mosquitto.address)
    wait_up(watcher)
    watcher.subscribe([topics.current_round, f"{topics.root}/blobs/#"])
    wait_message(watcher, topics.current_round)  # all blobs went out before it
    session, fence = server.service._session, f"{topics.root}/fence"
    watcher.subscribe([fence])
    session.publish(fence, b"all that is published first", retain=True)
    wait_message(watcher, fence)

    connection = session._client.socket()
    assert isinstance(connection, socket.socket)
    connection.shutdown(socket.SHUT_RDWR)
    server.wait_for(Online)
    wait_until(lambda: server.service.driver.announcements.publisher.online, "the broker told what it has")
    session.publish(fence, b"end", retain=True)

    seen = []
    while (event := wait_for(watcher, IncomingMessage)).topic != fence:
        seen.append(event.topic)
    assert [topic for topic in seen if "/blobs/" in topic] == []


def test_what_the_access_list_forbids_the_server_is_told_with_its_topic(
    tmp_path: Path, limits: Limits
) -> None:
    broker = SecureBroker(tmp_path)
    broker.start()
    try:
        server = RunningServer.start(plan_for("orchard", limits), broker.user("pi-1"), tmp_path / "out")
        told = server.wait_for(Warned, lambda event: "refuses to publish" in event.text)
        assert "edgefl/v1/orchard/" in told.text and "Not authorized" in told.text
        server.stop()
    finally:
        broker.stop()
