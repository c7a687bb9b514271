"""A link that breaks costs the server's connection, and not the whole model once more."""

from __future__ import annotations

from pathlib import Path

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import Online, Waiting, Warned
from tests.secure import SecureBroker
from tests.server.fleet import RunningServer, Serve, plan_for
from tests.wire.mqtt.events import cut, wait_for, wait_message, wait_until


def test_after_a_cut_the_broker_gets_only_news(serve: Serve, stranger: Session, federation: str) -> None:
    server = serve()
    server.wait_for(Waiting)
    topics, watcher = Topics(federation), stranger
    watcher.subscribe([topics.current_round, f"{topics.root}/blobs/#"])
    wait_message(watcher, topics.current_round)  # all blobs went out before it
    session, fence = server.service._session, f"{topics.root}/fence"
    watcher.subscribe([fence])
    session.publish(fence, b"all that is published first", retain=True)
    wait_message(watcher, fence)

    cut(session)
    server.wait_for(Online)
    wait_until(lambda: server.service.driver.announcements.publisher.online, "the broker told what it has")
    session.publish(fence, b"end", retain=True)

    seen = []
    while (event := wait_for(watcher, IncomingMessage)).topic != fence:
        seen.append(event.topic)
    assert [topic for topic in seen if "/blobs/" in topic] == []


def test_a_forbidden_topic_is_reported(tmp_path: Path, limits: Limits) -> None:
    with SecureBroker(tmp_path) as broker:
        server = RunningServer.start(plan_for("orchard", limits), broker.user("pi-1"), tmp_path / "out")
        told = server.wait_for(Warned, lambda event: "refuses to publish" in event.text)
        assert "edgefl/v1/orchard/" in told.text and "Not authorized" in told.text
        server.stop()
