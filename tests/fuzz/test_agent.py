"""The device's way from a topic and bytes: a false server ends no agent, and fills neither its memory nor its disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fuzz_messages import mutated, random_topic
from edgefl.errors import EdgeflError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Ack, encode
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, AgentEvent, DeviceLog
from edgefl_device.engine import open_engine
from tests.device_runtime.agent.scripted import DEVICE, write_data
from tests.fuzz.corpus import golden

MESSAGES = 3_000
NOWHERE = Address("127.0.0.1", 9)
STORE_BYTES = 1 << 20


@pytest.fixture
def told() -> list[AgentEvent]:
    return []


@pytest.fixture
def agent(tmp_path: Path, told: list[AgentEvent]) -> Iterator[DeviceAgent]:
    """An agent without a broker: what it would be sent is handed to it."""
    limits = Limits(store_bytes=STORE_BYTES, max_blob_bytes=STORE_BYTES, chunk_bytes=1024)
    config = AgentConfig(
        federation="f",
        device=DEVICE,
        broker=NOWHERE,
        data=write_data(tmp_path),
        folder=tmp_path / "state",
        tier="",
        memory_bytes=1 << 30,
        until_done=False,
        limits=limits,
    )
    made = DeviceAgent(config, open_engine("onnx"), DeviceLog(told.append))
    yield made
    made.profiles.stop()
    made.store.close()


def test_no_message_ends_an_agent(agent: DeviceAgent, told: list[AgentEvent], tmp_path: Path) -> None:
    rng, topics = random.Random(7), Topics("f")
    mine, corpus = topics.device(DEVICE), golden("*.bin")
    named = (
        topics.current_round,
        mine.tasks,
        mine.acks,
        mine.profile_requests,
        topics.blob_chunk("0" * 64, 0),
    )
    for _ in range(MESSAGES):
        topic = random_topic(rng, topics.root) if rng.random() < 0.2 else rng.choice(named)
        agent.receive(IncomingMessage(topic, mutated(rng, rng.choice(corpus), corpus)))

    size = sum(path.stat().st_size for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert size < 2 * STORE_BYTES
    assert len(agent.rounds._seen_open) <= 16
    assert not agent.rounds.is_busy
    assert all(len(event.text) < 5_000 for event in told), "what is told is bounded"


def test_senseless_tasks_end_no_agent(agent: DeviceAgent) -> None:
    rng, topics = random.Random(8), Topics("f")
    rounds, tasks = golden("round_*"), golden("task.bin")
    for _ in range(200):
        agent.receive(IncomingMessage(topics.current_round, mutated(rng, rounds[0], rounds)))
        agent.receive(IncomingMessage(topics.device(DEVICE).tasks, mutated(rng, tasks[0], tasks)))
        try:
            announced = agent.rounds.announced
            if announced is not None and announced.pages is None:
                agent.rounds.next_job(announced)
        except EdgeflError as error:  # said by name, where the agent's loop would end
            raise AssertionError(f"an announcement ends the agent: {error.message}") from error


def test_acknowledgements_pile_up_nowhere(agent: DeviceAgent) -> None:
    topic = Topics("f").device(DEVICE).acks
    for number in range(5_000):
        ack = Ack(round=1, nonce=f"{number:016x}", status="missing", missing=list(range(100)))
        agent.receive(IncomingMessage(topic, encode(ack)))

    assert agent.outbox._acks.qsize() <= 1_000
