"""What a device says where it would else wait without a word: a wrong federation, a rival, a tier it has not got."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.messages import Ack
from edgefl_device.link.identity import KEY_FILE
from tests import needs
from tests.conftest import Mosquitto, SessionFactory
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import DEVICE, RunningAgent, ScriptedServer
from tests.device_runtime.tiny import World
from tests.secure import SecureBroker
from tests.wire.mqtt.events import wait_up
from tests.wire.mqtt.test_neighbours import announce


@pytest.fixture
def soon(limits: Limits) -> Limits:
    return msgspec.structs.replace(limits, notice_s=0.05)


def test_a_device_with_another_federation_s_name_tells_who_is_there(
    own_mosquitto: Mosquitto, connect: SessionFactory, tmp_path: Path, soon: Limits
) -> None:
    session = connect(own_mosquitto.address)
    wait_up(session)
    announce(session, "b", "open")
    agent = RunningAgent("a", own_mosquitto.address, tmp_path, soon)
    try:
        place = f"127.0.0.1:{own_mosquitto.port}"
        told = (
            f"nothing is heard of federation 'a' at {place}; there is 'b': name the right one "
            "(`edgefl device --federation`)"
        )
        assert agent.event("alone").text == told
    finally:
        agent.stop()


@pytest.mark.parametrize(
    ("line", "named"),
    [("retain_available false", "takes no retained messages"), ("max_packet_size 280", "280 at most")],
)
def test_a_device_ends_at_a_limit_without_retry(tmp_path: Path, soon: Limits, line: str, named: str) -> None:
    broker = Mosquitto(tmp_path, line)
    broker.start()
    agent = RunningAgent("a", broker.address, tmp_path, soon)
    error = agent.ended()
    broker.stop()
    assert isinstance(error, BrokerError)
    assert named in error.message


def test_a_device_without_server_says_that_it_waits(
    own_mosquitto: Mosquitto, connect: SessionFactory, tmp_path: Path, soon: Limits, world: World
) -> None:
    server = ScriptedServer(connect(own_mosquitto.address), "lonely")
    agent = RunningAgent("lonely", own_mosquitto.address, tmp_path, soon)
    try:
        text = agent.event("alone").text
        assert (
            "nothing is heard of federation 'lonely'" in text and "this device waits for the server" in text
        )

        server.open(world)
        update = server.update()
        server.ack(update)
        seen = agent.event("accepted", "alone")
        assert seen.event == "accepted", "said once, and not at all in company"
    finally:
        agent.stop()


def test_a_device_that_the_server_gives_no_task_says_so_once(
    own_mosquitto: Mosquitto, connect: SessionFactory, tmp_path: Path, soon: Limits, world: World
) -> None:
    server = ScriptedServer(connect(own_mosquitto.address), "shy")
    server.announce(world.announcement())
    agent = RunningAgent("shy", own_mosquitto.address, tmp_path, soon)
    try:
        text = agent.event("left-out").text
        assert text.startswith("round 1 began without this device, ")
        assert text.endswith(f"let this device write below edgefl/v1/shy/devices/{DEVICE}/")

        server.announce(world.announcement(number=2))
        server.announce(world.announcement(number=2, state="done"))
        server.announce(world.announcement(number=2, state="done"))
        over = agent.event("left-out", "done")
        assert (over.event, over.text) == ("done", "the training of federation 'shy' is over")
        server.open(world, number=3, run="next")
        assert agent.event("done", "round").event == "round"
    finally:
        agent.stop()


def test_a_round_beyond_its_deadline_is_of_a_server_that_has_stopped(
    own_mosquitto: Mosquitto, connect: SessionFactory, tmp_path: Path, soon: Limits, world: World
) -> None:
    server = ScriptedServer(connect(own_mosquitto.address), "stopped")
    server.announce(msgspec.structs.replace(world.announcement(), deadline=1.0))
    agent = RunningAgent("stopped", own_mosquitto.address, tmp_path, soon)
    try:
        text = agent.event("left-out").text
        assert text.startswith("round 1 was announced until ") and "write below" not in text

        server.announce(world.announcement())
        assert agent.event("left-out").text.startswith("round 1 began without this device")
    finally:
        agent.stop()


def test_two_devices_of_one_name_and_key_say_what_happens_and_what_to_do(
    mosquitto: Mosquitto, federation: str, tmp_path: Path, limits: Limits
) -> None:
    needs.require("mosquitto")  # the embedded broker may leave two such clients connected
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:  # copies of one store
        (folder / "state").mkdir(parents=True)
        (folder / "state" / KEY_FILE).write_text(bytes(range(32)).hex())
        (folder / "state" / KEY_FILE).chmod(0o600)
    agents = [RunningAgent(federation, mosquitto.address, folder, limits) for folder in folders]
    try:
        for agent in agents:
            text = agent.event("rival").text
            assert "another client takes the place of this one" in text
            assert f"as {DEVICE!r} too (`edgefl device --id`); give each its own name" in text
    finally:
        for agent in agents:
            agent.stop()


def test_the_servers_word_on_tiers_is_told(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    text = "no tier is called 'weka'; there are strong, weak"
    for _ in range(2):
        ack = Ack(round=0, nonce="", status="rejected", reason="unknown-tier", text=text)
        server.publish(server.mine.acks, messages.encode(ack))
    server.open(world)

    told = agent.event("tier", "round")
    assert (told.event, told.text, told.details["reason"]) == ("tier", text, "unknown-tier")
    assert agent.event("tier", "round").event == "round", "and the device takes what it is given"
    assert server.update().nonce == "n1", "an update that waits is none of its business"


def test_a_message_that_the_server_cannot_read_is_told(server: ScriptedServer, start: StartAgent) -> None:
    agent = start()
    server.hello()
    ack = Ack(round=0, nonce="", status="rejected", reason="malformed", text="Progress message is malformed")
    server.publish(server.mine.acks, messages.encode(ack))

    assert agent.event("refused").text == ack.text


def test_a_failed_attempt_tells_its_reason(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    damaged = server.topics.blob_chunk(world.unit_refs["mid"][0].sha256, 0)
    server.publish(damaged, b"damaged", retain=True)
    server.announce(world.announcement())
    server.assign(world.task())
    progress = server.failed()
    assert (progress.stage, progress.round, progress.tier) == ("failed: no good chunk", 1, "weak")


def test_data_that_do_not_fit_are_declined_and_the_device_stays(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 9), np.float32), y=np.zeros(4, np.int64))
    agent = start(data=tmp_path / "wide.npz")

    server.open(world)

    decline = server.decline()
    assert (decline.round, decline.nonce, decline.reason) == (1, "n1", "wrong-data")
    assert "shape (9,), the model takes (3,)" in agent.event("declined").text
    assert agent.alive


def test_what_the_access_list_forbids_is_said_with_the_topic(tmp_path: Path, limits: Limits) -> None:
    broker = SecureBroker(tmp_path)
    broker.start()
    agent = RunningAgent("orchard", broker.user("pi-1"), tmp_path, limits)
    try:
        denied = agent.event("denied")
        assert f"refuses to publish edgefl/v1/orchard/devices/{DEVICE}/" in denied.text
        assert denied.details["reason"] == "Not authorized"
    finally:
        agent.stop()
        broker.stop()
