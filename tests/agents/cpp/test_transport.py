"""C++ agents over TLS, the command and a program that embeds the library: what they say of keys, and what a cut costs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire.mqtt.address import read_secret
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import Hello
from edgefl.wire.mqtt.topics import Topics
from tests.agents.cpp.build import embedded
from tests.agents.cpp.processes import CppAgent
from tests.conftest import SessionFactory
from tests.device_runtime.agent.scripted import DEVICE, write_data
from tests.secure import SecureBroker
from tests.wire.mqtt.events import wait_message, wait_up

FEDERATION = "orchard"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    broker = SecureBroker(tmp_path_factory.mktemp("secure"), devices=(DEVICE,))
    broker.start()
    yield broker
    broker.stop()


def test_it_is_heard_over_tls_with_a_password(
    tmp_path: Path, broker: SecureBroker, connect: SessionFactory
) -> None:
    server, needs = connect(broker.user("server")), broker.lab.needs(DEVICE)
    hello = Topics(FEDERATION).device(DEVICE).hello
    server.subscribe([hello])
    wait_up(server)
    password = ("--password-file", needs["password-file"])
    agent = CppAgent.of(FEDERATION, needs["broker"], write_data(tmp_path), tmp_path / "store", *password)

    assert peek(Hello, wait_message(server, hello)).agent.startswith("edgefl-agent/")
    assert agent.stop() == 0


def test_a_broker_of_another_authority_is_not_spoken_to(tmp_path: Path, broker: SecureBroker) -> None:
    other = SecureBroker(tmp_path, devices=(DEVICE,))
    other.lab.command()
    needs, mine = broker.lab.needs(DEVICE), other.lab.needs(DEVICE)
    address, _, _ = needs["broker"].partition("?")
    options = ("--ca-file", mine["broker"].partition("ca-file=")[2], "--password-file", needs["password-file"])
    agent = CppAgent.of(FEDERATION, address, write_data(tmp_path), tmp_path / "store", *options)

    assert "the broker's certificate is not of the authority in" in agent.event("offline")["text"]
    assert agent.stop() == 0


def test_a_program_that_embeds_the_library_outlives_a_connection_that_is_cut(
    tmp_path: Path, broker: SecureBroker
) -> None:
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
