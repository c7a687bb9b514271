"""The server from a topic and bytes to a verdict: nothing ends it, nothing wrong is accepted, nothing piles up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fuzz_messages import mutated, random_topic
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Connected, IncomingMessage
from edgefl.wire.mqtt.messages import Hello, Status, Task, UpdateChunk, encode
from edgefl.wire.mqtt.topics import Topics
from edgefl_server import events
from edgefl_server.service import Service
from tests.fuzz.corpus import golden
from tests.server.fleet import WEIGHTS, chunks_of, plan_for, progress, trained, update_for
from tests.support.listeners import CallingListener

MESSAGES = 3_000
NOWHERE = Address("127.0.0.1", 9)
DEVICE = "strong-0"
LIMITS = Limits(chunk_bytes=1024, max_pending_bytes=1 << 16)


@pytest.fixture
def told() -> list[events.Event]:
    return []


@pytest.fixture
def service(tmp_path: Path, told: list[events.Event]) -> Iterator[Service]:
    """A server with an open round and no broker: what it would be sent is handed to it."""
    made = Service(
        plan_for("f", LIMITS), NOWHERE, tmp_path, listener=CallingListener(told.append), device="cpu"
    )
    made.handle(Connected(resumed=False))
    topics = Topics("f").device(DEVICE)
    hello = Hello(agent="a", memory_bytes=1 << 30, cores=1, samples=10, engines={})
    made.handle(IncomingMessage(topics.status, encode(Status(online=True))))
    made.handle(IncomingMessage(topics.hello, encode(hello)))
    assert made.state.round is not None
    yield made
    made.close()


def honest(service: Service) -> tuple[Task, list[UpdateChunk]]:
    """The task of the open round, and the pieces of its update."""
    opened = service.state.round
    assert opened is not None
    own = opened.assignments[DEVICE]
    task = Task(run=service._rules.run, round=1, tier="strong", seed=1, nonce=own.nonce)
    update = update_for(DEVICE, task, opened.model_version, trained(DEVICE, task))
    return task, chunks_of(encode(update), own.nonce, 1024)


def genuine(service: Service) -> list[bytes]:
    """Messages of the open round, and one of each kind."""
    task, chunks = honest(service)
    training = progress("train", step=1, steps=2)
    return [
        *map(encode, (*chunks, task)),
        encode(training),
        *golden("hello*", "status*", "decline*", "update*", "ack*"),
    ]


def test_no_message_ends_the_server(service: Service, told: list[events.Event]) -> None:
    rng, root, corpus = random.Random(5), Topics("f").root, genuine(service)
    names = (DEVICE, "strong-1", "stranger", "x" * 63)
    leaves = (
        "status",
        "hello",
        "progress",
        "declines",
        "updates/1/0",
        "updates/1/1",
        "updates/2/0",
        "profiles",
    )
    for _ in range(MESSAGES):
        topic = (
            random_topic(rng, root)
            if rng.random() < 0.3
            else f"{root}/devices/{rng.choice(names)}/{rng.choice(leaves)}"
        )
        service.handle(IncomingMessage(topic, mutated(rng, rng.choice(corpus), corpus)))

    assert service.held_bytes <= LIMITS.max_pending_bytes + LIMITS.chunk_bytes
    reported = [event for event in told if isinstance(event, events.DeviceSeen) and event.stage == "reported"]
    assert reported == [], "every update was changed"
    assert all(
        array.tobytes() == WEIGHTS[name].tobytes() for name, array in service.driver.model.weights.items()
    )
    assert sum(len(str(event)) for event in told) < MESSAGES * 2_000


def test_an_honest_update_is_accepted_after_all_of_it(service: Service, told: list[events.Event]) -> None:
    rng, root, corpus = random.Random(6), Topics("f").root, genuine(service)
    for _ in range(500):
        topic = f"{root}/devices/stranger/{rng.choice(('hello', 'updates/1/0', 'declines', 'progress'))}"
        service.handle(IncomingMessage(topic, mutated(rng, rng.choice(corpus), corpus)))
    for chunk in honest(service)[1]:
        service.handle(IncomingMessage(f"{root}/devices/{DEVICE}/updates/1/{chunk.index}", encode(chunk)))

    assert [
        event.device for event in told if isinstance(event, events.DeviceSeen) and event.stage == "reported"
    ] == [DEVICE]


@pytest.mark.parametrize("leaf", ["updates", "hello", "status", "progress", "declines", "unheard-of"])
def test_topics_with_too_few_and_too_many_numbers_are_no_topics(service: Service, leaf: str) -> None:
    """With messages that read well, by devices that are let in: nothing of the loop may end."""
    payloads = genuine(service)
    for numbers in ("", "/1", "/1/0", "/1/0/0", "/-1", "/x/y", "/1/0/"):
        for payload in payloads:
            for device in (DEVICE, "nobody"):
                topic = f"{Topics('f').root}/devices/{device}/{leaf}{numbers}"
                service.handle(IncomingMessage(topic, payload))
    assert service.state.round is not None
