"""The attack matrix's rows against a server that has a list, a key and a broker with TLS: the honest round ends with the
weights that it would have had (:meth:`Stage.goes_on`), and what was tried is told."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import ClientIds, Role, client_id
from edgefl.wire.mqtt.envelope import unsigned
from edgefl.wire.mqtt.events import Disconnected, Event, IncomingMessage, Refusal
from edgefl.wire.mqtt.messages import Hello, Round, Status, Task, UpdateChunk, encode
from edgefl.wire.mqtt.session import Session
from edgefl_server.events import DeviceLost, Offline, Rejected, RoundClosed
from tests.conftest import SessionFactory
from tests.e2e.hostile.stage import DEVICES, EVERYTHING, FEDERATION, TOPICS, Stage, Tap, changed, secured
from tests.server.fleet import chunks_of, progress, trained, update_for
from tests.wire.mqtt.events import wait_for, wait_until, wait_up
from tests.wire.mqtt.speakers import speaker_in

HELLO = Hello(agent="t", memory_bytes=1 << 30, cores=1, samples=10, engines={})
FIRST, SECOND = (TOPICS.device(name) for name in DEVICES)
PROGRESS = progress("train")

MakeStage = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path, limits: Limits) -> Iterator[MakeStage]:
    with ExitStack() as stack:
        broker = stack.enter_context(secured(tmp_path / "broker", *DEVICES))
        yield lambda **rules: Stage(broker, tmp_path, limits, stack, **rules)


def spoiled(name: str, task: Task, opened: Round) -> bytes:
    """A well-formed update that turns the model round."""
    arrays = {key: -100 * array for key, array in trained(name, task).items()}
    return encode(update_for(name, task, opened.model_version, arrays))


def send(session: Session, stage: Stage, name: str, task: Task, data: bytes, seal: Any = unsigned) -> None:
    for chunk in chunks_of(data, task.nonce, stage.limits.chunk_bytes):
        topic = TOPICS.device(name).update(task.round, chunk.index)
        session.publish(topic, seal(topic, chunk))


def everything(stage: Stage, connect: SessionFactory) -> Tap:
    tap = Tap(connect(stage.broker.user(EVERYTHING)))
    wait_up(tap.session)
    return tap


# -- an outsider without credentials ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guess", [{"username": "", "password": ""}, {"password": "guessed"}], ids=["nobody", "wrong-password"]
)
def test_an_outsider_is_not_connected(
    stage: MakeStage, connect: SessionFactory, guess: dict[str, str]
) -> None:
    """read, write, replay, poison: nothing of it without a connection."""
    fleet = stage()
    address = replace(fleet.broker.user("strong-0"), **guess)
    assert "Not authorized" in wait_for(connect(address), Disconnected).reason
    fleet.goes_on()


def test_an_outsider_floods_the_port_with_connections_and_rubbish(stage: MakeStage) -> None:
    """flood, crash: the broker takes it, and the server never sees it."""
    fleet = stage()
    opened = fleet.opened()
    context = ssl.create_default_context(cafile=fleet.broker.user("server").ca_file)
    held = []
    for number in range(100):
        raw = socket.create_connection(("127.0.0.1", fleet.broker.port))
        held.append(raw)
        with suppress(OSError):  # the broker hangs up whenever it likes
            if number % 2:
                raw.sendall(os.urandom(512))
            else:
                context.wrap_socket(raw, server_hostname="127.0.0.1").sendall(os.urandom(512))
    fleet.goes_on(opened=opened)
    for each in held:
        each.close()


# -- with a stolen device's credentials, or a dishonest device -------------------------------------------------


def test_a_device_has_only_its_own_topics(stage: MakeStage, connect: SessionFactory) -> None:
    """read, write: with all that strong-1 has."""
    fleet = stage()
    thief = connect(fleet.broker.user("strong-1"))
    wait_up(thief)
    thief.subscribe(["edgefl/#"])
    opened = fleet.opened()
    _, [task, _] = opened
    send(
        thief, fleet, "strong-0", task, spoiled("strong-0", task, opened[0]), fleet.speakers["strong-1"].seal
    )
    thief.publish(FIRST.status, encode(Status(online=False)), retain=True)
    thief.publish(TOPICS.current_round, b"", retain=True)
    came: list[Event] = []
    while not any(isinstance(event, Refusal) and event.topic == TOPICS.current_round for event in came[-1:]):
        came.append(thief.inbox.get(timeout=60.0))  # until the last of them was refused
    fleet.goes_on(opened=opened)
    while not thief.inbox.empty():
        came.append(thief.inbox.get())
    refused = {event.topic for event in came if isinstance(event, Refusal)}
    heard = {event.topic for event in came if isinstance(event, IncomingMessage)}
    assert refused >= {FIRST.update(1, 0), FIRST.status, TOPICS.current_round}
    assert heard and not any(f"/{DEVICES[0]}/" in topic for topic in heard)


def test_credentials_without_the_key_are_no_device(stage: MakeStage, connect: SessionFactory) -> None:
    """write, poison: the password alone was stolen; bare words and words of another key count for nothing."""
    fleet = stage()
    opened = fleet.opened()
    _, [task, _] = opened
    thief = connect(fleet.broker.user("strong-0"))
    wait_up(thief)
    forged = spoiled("strong-0", task, opened[0])
    send(thief, fleet, "strong-0", task, forged)
    assert fleet.server.wait_for(Rejected).reason == "unsigned"
    send(thief, fleet, "strong-0", task, forged, speaker_in(fleet.folder / "thief.key").seal)
    assert fleet.server.wait_for(Rejected).reason == "wrong-key"
    fleet.goes_on(opened=opened)


def test_what_a_device_said_once_is_not_said_again(stage: MakeStage, connect: SessionFactory) -> None:
    """replay: an update of the first round in the second, and a hello from before the last one."""
    fleet = stage(rounds=2)
    everywhere = everything(fleet, connect)
    opened = fleet.opened(1)
    everywhere.has("strong-0/hello")
    fleet.devices[0].greet()
    fleet.goes_on(1, opened)
    everywhere.has("strong-0/updates/1")
    later = fleet.opened(2)
    thief = connect(fleet.broker.user("strong-0"))
    wait_up(thief)

    old = everywhere.heard_on("strong-0/hello")[0]
    thief.publish(old.topic, old.payload)
    assert fleet.server.wait_for(Rejected, lambda event: event.reason == "replayed").device == "strong-0"
    for piece in everywhere.heard_on("strong-0/updates/1"):
        thief.publish(piece.topic, piece.payload)  # acknowledged again, and counted once
        topic = piece.topic.replace("/updates/1/", "/updates/2/")
        thief.publish(topic, piece.payload)
    assert fleet.server.wait_for(Rejected).reason == "wrong-signature"
    fleet.goes_on(2, later)


def test_a_device_that_floods_costs_itself(stage: MakeStage, connect: SessionFactory) -> None:
    """flood: progress, hellos and pieces of updates that are never whole, all signed by the device's own key."""
    fleet = stage(deadline_s=60.0)
    opened = fleet.opened()
    loud, seal = connect(fleet.broker.user("strong-1")), fleet.speakers["strong-1"].seal
    wait_up(loud)
    nonce, digest = opened[1][1].nonce, "0" * 64
    pieces = [
        UpdateChunk(nonce=nonce, sha256=digest, index=index, count=9, size=4500, data=bytes(500))
        for index in (0, 1)
    ]
    stray = msgspec.structs.replace(pieces[0], nonce="0" * 24)
    for number in range(700):
        loud.publish(SECOND.progress, seal(SECOND.progress, PROGRESS), qos=0)
        for topic, chunk in (
            (SECOND.update(1, number % 2), pieces[number % 2]),
            (SECOND.update(1, 0), stray),
        ):
            loud.publish(topic, seal(topic, chunk), qos=0)
    last = loud.publish(SECOND.hello, seal(SECOND.hello, HELLO))
    assert last.wait(60.0)
    wait_until(lambda: fleet.server.service.held_bytes > 1000, "pieces that are kept")
    fleet.goes_on(opened=opened)
    assert fleet.turned_away["messages too often"] > 0 and fleet.turned_away["objections too often"] > 0


def test_a_second_update_of_a_stolen_device_is_not_taken(stage: MakeStage, connect: SessionFactory) -> None:
    """poison: the thief has everything of strong-0, and one update a task counts, the first."""
    fleet = stage()
    opened = fleet.opened()
    _, [task, _] = opened
    fleet.devices[0].report(task, opened[0])
    assert fleet.devices[0].acks.get(timeout=60.0).status == "accepted"
    thief = connect(fleet.broker.user("strong-0"))
    wait_up(thief)
    seal = fleet.speakers["strong-0"].seal
    send(thief, fleet, "strong-0", task, spoiled("strong-0", task, opened[0]), seal)
    while (ack := fleet.devices[0].acks.get(timeout=60.0)).status == "accepted":
        pass
    assert ack.reason == "other-update"
    fleet.goes_on(opened=opened)


def test_what_cannot_be_read_ends_nothing(stage: MakeStage, connect: SessionFactory) -> None:
    """crash: rubbish on each topic of a device, bare and signed, and an update that is none."""
    fleet = stage()
    opened = fleet.opened()
    loud, seal = connect(fleet.broker.user("strong-1")), fleet.speakers["strong-1"].seal
    wait_up(loud)
    rng = np.random.default_rng(0)
    topics = (SECOND.status, SECOND.hello, SECOND.progress, SECOND.declines, SECOND.update(1, 0))
    genuine = [seal(topic, PROGRESS) for topic in topics]
    for topic, payload in zip(topics, genuine, strict=True):
        for rubbish in (rng.bytes(300), b"\xdf\xff\xff\xff\xff", payload, changed(payload, 40), payload[:-3]):
            loud.publish(topic, rubbish)
    assert loud.publish(SECOND.progress, seal(SECOND.progress, PROGRESS)).wait(60.0)
    reasons = {fleet.server.wait_for(Rejected).reason for _ in range(4)}
    assert "malformed" in reasons
    fleet.goes_on(opened=opened)


def test_a_revoked_key_is_no_key_at_once(stage: MakeStage) -> None:
    """write: a theft that was noticed. Its round gives the device up, and the next one does not wait for it."""
    fleet = stage(min_reports=1, rounds=2, offline_grace_s=3.0)
    honest, revoked = fleet.devices
    opened, [task, other] = fleet.opened()
    fleet.registry.revoke("strong-1")
    revoked.report(other, opened)
    assert fleet.server.wait_for(Rejected).reason == "revoked-key"
    honest.report(task, opened)
    assert honest.acks.get(timeout=60.0).status == "accepted"
    assert fleet.server.wait_for(RoundClosed).reports == 1

    honest.report(fleet.task_of(honest, 2), honest.wait_open(2))
    closed = fleet.server.wait_for(RoundClosed)
    fleet.server.join()
    assert (closed.round, closed.outcome, closed.reports) == (2, "closed", 1)
    assert all(task.round == 1 for task in revoked.tasks.queue), "the revoked device was selected"


# -- the broker ------------------------------------------------------------------------------------------------


def test_a_broker_that_alters_messages_changes_no_weight(stage: MakeStage, connect: SessionFactory) -> None:
    """write, replay, poison: it sees all, keeps all, and says what it likes under any name."""
    fleet = stage(rounds=2)
    broker = everything(fleet, connect)
    fleet.goes_on(1)
    broker.has("strong-1/updates/1")
    later = fleet.opened(2)
    said = [event for event in broker.heard if "/devices/" in event.topic and event.payload]

    for event in said:
        broker.session.publish(event.topic, changed(event.payload, -2))
        broker.session.publish(event.topic, event.payload)
        broker.session.publish(event.topic.replace("/strong-0/", "/strong-1/"), event.payload)
    task = later[1][0]
    forged = spoiled("strong-0", task, later[0])
    send(broker.session, fleet, "strong-0", task, forged, speaker_in(fleet.folder / "broker.key").seal)
    reasons = set()
    while "wrong-key" not in reasons:
        reasons.add(fleet.server.wait_for(Rejected).reason)
    assert "wrong-signature" in reasons
    fleet.goes_on(2, later)


def test_a_flood_of_the_broker_ends_nothing(stage: MakeStage, connect: SessionFactory) -> None:
    """flood, crash: under names that nobody has, and below all of the federation."""
    fleet = stage()
    opened = fleet.opened()
    broker = everything(fleet, connect)
    rng = np.random.default_rng(0)
    for number in range(600):
        stranger = TOPICS.device(f"strong-{number + 2}")
        broker.session.publish(stranger.hello, encode(HELLO), qos=0)
        broker.session.publish(stranger.status, encode(Status(online=True)), qos=0)
        broker.session.publish(f"{TOPICS.root}/devices/{number}/x/y", rng.bytes(50), qos=0)
    assert broker.session.publish(FIRST.progress, rng.bytes(100)).wait(60.0)
    fleet.goes_on(opened=opened)
    assert {each.device for each in fleet.registry.all()} == set(DEVICES)


def test_client_ids_of_others_end_no_connection(stage: MakeStage, connect: SessionFactory) -> None:
    """With credentials of its own, and each id that the protocol's names give away."""
    staged = stage()
    opened = staged.opened()
    user = staged.broker.user(EVERYTHING)
    roles: list[tuple[Role, str]] = [("server", ""), *(("device", name) for name in DEVICES)]
    guesses = [
        guess
        for role, name in roles
        for style in get_args(ClientIds)
        for guess in {client_id(secret, role, FEDERATION, name, style=style) for secret in (b"", bytes(32))}
    ]
    for guess in guesses:
        wait_up(connect(user, guess))
    staged.goes_on(opened=opened)
    assert not staged.server.seen_of(Offline) and not staged.server.seen_of(DeviceLost)
