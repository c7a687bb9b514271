"""What hosted brokers do not take of a federation."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server.access.files import aws_policy
from edgefl_server.access.limits import HOSTED, TrafficEstimate, find_exceeded_limits, longest_topics
from edgefl_server.access.rules import ROLES, AccessRules
from tests.server.publish.test_publisher import announcement, connected
from tests.support.errors import ConfigError, refuses

AWS = HOSTED["aws"]
SECURE = Address("host", 8883, tls=True, client_ids="full")


def found(**changes: Any) -> str:
    given = {"federation": "demo", "limits": Limits(), "address": SECURE, **changes}
    return "\n".join(find_exceeded_limits(AWS, **given))


def test_the_defaults_with_readable_ids_fit_aws() -> None:
    assert found() == ""


@pytest.mark.parametrize("federation", ["demo", "f" * 63])
def test_topics_and_policies_fit_aws_whatever_the_names(federation: str) -> None:
    for topic in longest_topics(federation):
        assert topic.count("/") <= 7 and len(topic) <= 256
    for role in ROLES:
        policy = aws_policy(AccessRules(federation), role, "ap-southeast-2:123456789012")
        assert len("".join(policy.split())) <= 2048


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"limits": Limits(chunk_bytes=1 << 18)}, "limits.chunk_bytes is 262144"),
        ({"limits": Limits(max_inflight=200)}, "limits.max_inflight is 200"),
        ({"limits": Limits(fetch_window=60)}, "limits.fetch_window is 60"),
        ({"subscribe_batch": 9}, "9 filters in a SUBSCRIBE"),
        ({"address": Address("host")}, "takes TLS only"),
        ({"address": Address("host", tls=True, client_ids="short")}, "broker.client_ids is short"),
        ({"traffic": TrafficEstimate(200_000, 10)}, "announcement of a round takes about 200000 bytes"),
        ({"traffic": TrafficEstimate(1000, 500)}, "publishes 500 messages at once"),
    ],
)
def test_what_aws_does_not_take_is_named(changes: dict[str, Any], text: str) -> None:
    assert text in found(**changes)


def test_an_announcement_above_the_limit_is_refused() -> None:
    broker, publisher = connected()
    publisher.message_limit = 50
    with refuses(ConfigError, size=321, limit=50, key="broker.profile"):
        publisher.announce(announcement(1))
    assert broker.log == []
