"""C++ agents over TLS, the command and a program that embeds the library: what they say of keys, and what a cut costs."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.address import read_secret
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import Hello, Offer
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_conformance.cases.elsewhere import BlobMirror, mirrored
from tests.agents.cpp.build import embedded
from tests.agents.cpp.processes import CppAgent
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime import tiny
from tests.device_runtime.agent.scripted import DEVICE, ScriptedServer, write_data
from tests.device_runtime.agent.test_formats import planned
from tests.device_runtime.tiny import World
from tests.secure import SecureBroker
from tests.wire.mqtt.events import wait_message, wait_up
from tests.wire.mqtt.test_hostile_broker import ANSWERED, ATTACKS, Attack, HostileBroker

FEDERATION = "orchard"
OTHER = "other"
"""A device beside the one that rounds are for."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with SecureBroker(tmp_path_factory.mktemp("secure"), devices=(DEVICE, OTHER)) as broker:
        yield broker


def test_tls_and_a_password_are_used(tmp_path: Path, broker: SecureBroker, connect: SessionFactory) -> None:
    server, needs = connect(broker.user("server")), broker.lab.needs(OTHER)
    hello = Topics(FEDERATION).device(OTHER).hello  # the broker keeps it
    server.subscribe([hello])
    wait_up(server)
    reached = ("--broker", needs["broker"], "--password-file", needs["password-file"])
    own = ("--id", OTHER, "--tier", "weak", "--federation", FEDERATION)
    agent = CppAgent(*own, *reached, "--data", write_data(tmp_path), "--store", tmp_path / "store")

    assert peek(Hello, wait_message(server, hello)).agent.startswith("edgefl-agent/")
    assert agent.stop() == 0


def test_a_broker_of_another_authority_is_not_spoken_to(tmp_path: Path, broker: SecureBroker) -> None:
    other = SecureBroker(tmp_path, devices=(DEVICE,))
    other.lab.command()
    needs, mine = broker.lab.needs(DEVICE), other.lab.needs(DEVICE)
    address, _, _ = needs["broker"].partition("?")
    options = (
        "--ca-file",
        mine["broker"].partition("ca-file=")[2],
        "--password-file",
        needs["password-file"],
    )
    agent = CppAgent.of(FEDERATION, address, write_data(tmp_path), tmp_path / "store", *options)

    assert "the broker's certificate is not of the authority in" in agent.event("offline")["text"]
    assert agent.stop() == 0


PIECE_S = 0.002
"""Pause between pieces of 64 KiB, 250 Mbit/s: without it all comes before another thread of the agent is scheduled."""
UNREAD: Attack = ("acknowledgements", "3.1.1", ANSWERED, ANSWERED, "")


@pytest.mark.parametrize(
    ("attack", "text"),
    [(ATTACKS[0], "QoS 2"), (ATTACKS[2], "a packet of more than"), (UNREAD, "reads none of")],
)
def test_a_dishonest_broker_costs_no_memory(tmp_path: Path, attack: Attack, text: str) -> None:
    _, version, first, more, _ = attack
    broker = HostileBroker(version, first, more, PIECE_S if len(more) == len(ATTACKS[2][3]) else 0.0)
    address = f"mqtt://{broker.address}?mqtt={version}"
    agent = CppAgent.of(FEDERATION, address, write_data(tmp_path), tmp_path / "store")
    try:
        assert text in agent.event("offline")["text"]
        status = Path(f"/proc/{agent.process.pid}/status").read_text()
        peak_kib = int(status.partition("VmHWM:")[2].split()[0])
        assert peak_kib < 48 * 1024
    finally:
        broker.stop()
        assert agent.stop() == 0


def test_too_large_chunks_are_declined(
    tmp_path: Path, connect: SessionFactory, mosquitto: BrokerProcess
) -> None:
    world, federation = World(tiny.make_bundle()), "large-chunks"
    large = BlobRef(sha256="0" * 64, size=(4 << 20) + 1, chunk=8 << 20)
    offers = {"onnx": Offer(bundles={world.bundle.manifest.tier: large})}
    server = ScriptedServer(connect(mosquitto.address), federation)
    agent = CppAgent.of(federation, mosquitto.address, write_data(tmp_path), tmp_path / "store")
    server.hello()
    server.announce(msgspec.structs.replace(world.announcement(), offers=offers))
    server.assign(world.task())
    assert server.decline().reason == "large-chunks"
    assert "at most (limits.max_message_bytes), found 4194305" in agent.event("declined")["text"]
    server.open(planned(1), number=2)
    assert ", tier 'weak' is planned at 0.0 KiB; offer less memory" in agent.event("memory")["text"]
    assert agent.stop() == 0


class Server(ScriptedServer):
    """As a user whom an access list lets write what a server writes, and no hello."""

    def __init__(self, session: Session) -> None:
        self.session, self.topics = session, Topics(FEDERATION)
        self.mine = self.topics.device(DEVICE)
        self.digests = {}
        self._greeted = False
        session.subscribe(self.topics.server_filters)
        wait_up(session)


@contextmanager
def over_tls(broker: SecureBroker, blobs: Mapping[str, bytes]) -> Iterator[BlobMirror]:
    """A mirror with the broker's certificate."""
    config = dict(
        line.split(" ", 1) for line in (broker.lab.folder / "mosquitto.conf").read_text().splitlines()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config["certfile"], config["keyfile"])
    with mirrored(blobs, context) as mirror:
        yield mirror


@pytest.mark.parametrize("known", [True, False])
def test_a_mirror_over_tls_is_asked_if_its_certificate_holds(
    tmp_path: Path, broker: SecureBroker, connect: SessionFactory, mosquitto: BrokerProcess, known: bool
) -> None:
    """That of an authority which the device was given; a device that has another broker was given none."""
    world, needs, data = World(tiny.make_bundle()), broker.lab.needs(DEVICE), write_data(tmp_path)
    with over_tls(broker, world.blobs) as mirror:
        round = msgspec.structs.replace(world.announcement(), v=3, mirrors=(mirror.url,), mirrors_only=True)
        if known:
            server = Server(connect(broker.user("server")))
            options = ("--password-file", needs["password-file"])
            agent = CppAgent.of(FEDERATION, needs["broker"], data, tmp_path / "store", *options)
        else:
            server = ScriptedServer(connect(mosquitto.address), FEDERATION)
            agent = CppAgent.of(FEDERATION, mosquitto.address, data, tmp_path / "store")
        server.hello()
        server.announce(round)
        server.assign(world.task())
        if known:
            assert server.update().profile.mirror_bytes > 0
        else:
            assert "certificate" in agent.event("mirror")["text"].lower()
            assert mirror.asked == []

    assert agent.stop() == 0


def test_an_embedding_program_outlives_a_cut_connection(tmp_path: Path, broker: SecureBroker) -> None:
    """Writing to it raises SIGPIPE, which ends a process that does not handle it, as this one."""
    needs = broker.lab.needs(DEVICE)
    secret = read_secret(needs["password-file"])
    for name, kind in (("x", np.uint8), ("y", np.int64)):
        np.zeros(8 * (64 if name == "x" else 1), kind).tofile(tmp_path / name)
    address = needs["broker"].replace(f"{DEVICE}@", f"{DEVICE}:{secret}@")
    words = (address, FEDERATION, DEVICE, tmp_path / "store", "onnx", tmp_path / "x", tmp_path / "y")
    agent = CppAgent(command=(embedded(), *words))
    agent.event("online")
    for _ in range(3):
        broker.kill()
        agent.event("offline")
        broker.start()
        agent.event("online")

    assert agent.process.poll() is None
    agent.process.kill()
    assert agent.ended() == -signal.SIGKILL
