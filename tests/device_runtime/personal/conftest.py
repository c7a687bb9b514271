"""Tiers, and rounds of them on a real broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgefl.wire.mqtt.envelope import Seal, unsigned
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.topics import Topics
from tests.analysis.personal.tiers import Tier, tier_of
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.personal.asked import CHUNK
from tests.wire.mqtt.events import PATIENCE_S, wait_up


@pytest.fixture(scope="module")
def tier() -> Tier:
    return tier_of("mlp", chunk=CHUNK, cut=0)


@pytest.fixture(scope="module")
def prefixed() -> Tier:
    """The weak tier of the same model: it runs a frozen unit first."""
    return tier_of("mlp", chunk=CHUNK, cut=1)


@pytest.fixture
def publish(broker: BrokerProcess, connect: SessionFactory, federation: str) -> Callable[..., list[str]]:
    """Leave a tier's round on the broker; gives the options of a device that asks for it."""
    session, topics = connect(broker.address), Topics(federation)
    wait_up(session)

    def leave(tier: Tier, announced: Round, seal: Seal = unsigned) -> list[str]:
        for data in tier.blobs.values():
            publish_blob(session, topics, data, CHUNK)
        message = seal(topics.current_round, announced)
        assert session.publish(topics.current_round, message, retain=True).wait(PATIENCE_S)
        return ["--id", "phone", "--federation", federation, "--broker", str(broker.address)]

    return leave
