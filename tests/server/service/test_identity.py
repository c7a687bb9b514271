"""A server among strangers, on a real broker: forged and repeated messages, and what others do to what it keeps there."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from edgefl.errors import ProtocolError
from edgefl.wire.enrolment import new_token, prove
from edgefl.wire.keys import KeyPair, rotate
from edgefl.wire.mqtt.envelope import MessageSigner, open_message, unwrap
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import FAILED, LOST_CHUNK, Ack, Round, Task
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import Rejected, RoundClosed, Warned
from edgefl_server.identity.registry import Registry
from edgefl_server.service import ServerKeys
from tests.server.fleet import (
    PATIENCE_S,
    MakeDevice,
    MakePlan,
    RunningServer,
    ScriptedDevice,
    Serve,
    progress,
    retained,
    silent,
)
from tests.wire.mqtt.events import wait_for, wait_until
from tests.wire.mqtt.speakers import speaker_in


def signing(device: ScriptedDevice, speaker: MessageSigner) -> ScriptedDevice:
    """The device signs from now on."""
    device.seal = speaker.seal
    device.greet()
    return device


def test_all_that_a_server_says_is_signed_for_its_topic(
    serve: Serve, device: MakeDevice, stranger: Session, federation: str, tmp_path: Path
) -> None:
    topics = Topics(federation)
    mine = topics.device("strong-0")
    stranger.subscribe([topics.current_round, mine.tasks, mine.acks])
    server = serve(min_devices=1, rounds=1)
    device("strong-0")
    server.wait_for(RoundClosed)

    key = KeyPair(tmp_path / "out" / "signing.key").public
    for kind, topic in ((Round, topics.current_round), (Task, mine.tasks), (Ack, mine.acks)):
        event = wait_for(stranger, IncomingMessage, lambda event, topic=topic: event.topic == topic)
        assert open_message(kind, topic, event.payload).key == key  # type: ignore[type-var]


def test_with_a_list_only_devices_on_it_are_stored(
    serve: Serve, plan_of: MakePlan, federation: str, device: MakeDevice, tmp_path: Path
) -> None:
    speaker = speaker_in(tmp_path / "device.key")
    registry = Registry(tmp_path / "list.sqlite", federation)
    registry.add("strong-0", speaker.keys.public, source="request", now=0.0)
    server = serve(plan_of(min_devices=1, rounds=1), keys=ServerKeys(enrolled=tmp_path / "list.sqlite"))

    device("strong-1")
    assert server.wait_for(Rejected).reason == "unsigned"
    signing(device("strong-2", silent), speaker_in(tmp_path / "other.key"))
    assert server.wait_for(Rejected, lambda event: event.device == "strong-2").reason
    signing(device("strong-0"), speaker)
    closed = server.wait_for(RoundClosed)
    server.stop()

    assert closed.reports == 1
    assert [each.device for each in registry.all()] == ["strong-0"]
    registry.close()


@pytest.mark.parametrize("by", ["rotation", "token"])
def test_a_hello_admits_a_device_with_a_new_key(
    serve: Serve, device: MakeDevice, federation: str, tmp_path: Path, by: str
) -> None:
    """Its status comes first, under a key that nobody knows yet."""
    server = serve(min_devices=1, rounds=1)
    first = device("strong-0", silent, seal=speaker_in(tmp_path / "device.key").seal)
    first.wait_open()
    wait_until(lambda: _online(server, "strong-0"), "the device is there")
    first.vanish()
    wait_until(lambda: not _online(server, "strong-0"), "the device is gone")
    more = {}
    if by == "rotation":
        rotate(tmp_path / "device.key", overlap_s=60, now=time.time())
        renewed = speaker_in(tmp_path / "device.key", 1 << 41)
    else:
        renewed, token = speaker_in(tmp_path / "other.key"), new_token(bytes(32))
        known = Registry(tmp_path / "out" / "devices.sqlite", federation)
        known.issue(token, "strong-0", valid_until=time.time() + 600)
        known.close()
        topic = Topics(federation).device("strong-0").hello
        more = {"token": token.name, "proof": prove(token.secret, topic, renewed.keys.public)}

    again = device("strong-0", silent, seal=renewed.seal, **more)
    opened, task = again.wait_open(), again.tasks.get(timeout=PATIENCE_S)

    wait_until(lambda: _online(server, "strong-0"), "the device is there again")
    again.report(task, opened)
    assert server.wait_for(RoundClosed).reports == 1


def _online(server: RunningServer, name: str) -> bool:
    known = server.service.state.devices.get(name)
    return known is not None and known.online


def _announced(session: Session, topics: Topics, key: bytes, after: int) -> int:
    """The number of the next announcement that the server itself makes."""

    def ours(event: IncomingMessage) -> bool:
        if event.topic != topics.current_round or not event.payload:
            return False
        with suppress(ProtocolError):
            envelope = unwrap(event.payload)
            return envelope is not None and envelope.key == key and envelope.at > after
        return False

    envelope = unwrap(wait_for(session, IncomingMessage, ours).payload)
    assert envelope is not None
    return envelope.at


@pytest.mark.parametrize("by", [b"", b"nonsense"], ids=["cleared", "replaced"])
def test_an_announcement_that_another_client_replaces_is_restored(
    serve: Serve, stranger: Session, federation: str, tmp_path: Path, by: bytes
) -> None:
    server, topics = serve(min_devices=1, rounds=1), Topics(federation)
    key = KeyPair(tmp_path / "out" / "signing.key").public
    stranger.subscribe([topics.current_round])
    first = _announced(stranger, topics, key, 0)

    stranger.publish(topics.current_round, by, retain=True)

    assert _announced(stranger, topics, key, first) > first
    assert "cleared or replaced the announcement" in server.wait_for(Warned).text


def test_cleared_chunks_are_restored_once_a_device_lacks_them(
    serve: Serve, device: MakeDevice, stranger: Session, federation: str
) -> None:
    serve(min_devices=1, rounds=1)
    topics, lacking = Topics(federation), device("strong-0", silent)
    opened = lacking.wait_open()
    [ref, *_] = opened.units["head"]
    stranger.subscribe([topics.blob_chunk(ref.sha256, 0)])
    assert wait_for(stranger, IncomingMessage).payload

    stranger.publish(topics.blob_chunk(ref.sha256, 0), b"", retain=True)
    assert not wait_for(stranger, IncomingMessage).payload
    lacking.say(lacking.mine.progress, progress(f"{FAILED}{LOST_CHUNK}chunk 0"))

    assert wait_for(stranger, IncomingMessage).payload
    assert topics.blob_chunk(ref.sha256, 0) in retained(stranger, federation)
