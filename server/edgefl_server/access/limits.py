"""Limits of hosted brokers, and the check of a federation against them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.access.files import aws_policy
from edgefl_server.access.rules import ROLES, AccessRules

_LONGEST_NAME = "x" * 63
_NONCE, _SHA256 = "0" * 64, "0" * 64
_BIGGEST_ROUND, _BIGGEST_INDEX = 2**31 - 1, 9999
_PLACE = "ap-southeast-2:123456789012"
_STANDING = 4
"""Subscriptions that a device keeps (docs/protocol.md)."""


@dataclass(frozen=True)
class HostedLimits:
    """Documented limits of one hosted broker; sizes in bytes."""

    name: str
    source: str
    topic_slashes: int
    topic_bytes: int
    client_id_bytes: int
    payload_bytes: int
    filters_per_subscribe: int
    subscriptions: int
    unacknowledged: int
    publishes_s: int
    policy_characters: int


HOSTED: Mapping[str, HostedLimits] = {
    "aws": HostedLimits(
        name="AWS IoT Core",
        source="https://docs.aws.amazon.com/general/latest/gr/iot-core.html",
        topic_slashes=7,
        topic_bytes=256,
        client_id_bytes=128,
        payload_bytes=128 * 1024,
        filters_per_subscribe=8,
        subscriptions=50,
        unacknowledged=100,
        publishes_s=100,
        policy_characters=2048,
    )
}


@dataclass(frozen=True)
class TrafficEstimate:
    """Traffic estimate of a federation: announcement size in bytes, and messages that one round publishes at once."""

    announcement_bytes: int
    round_messages: int


def longest_topics(federation: str) -> tuple[str, ...]:
    """Return the longest topics that a federation uses, one of each kind, with a device name of the largest length."""
    topics = Topics(federation)
    device = topics.device(_LONGEST_NAME)
    return (
        topics.current_round,
        topics.blob_chunk(_SHA256, _BIGGEST_INDEX),
        device.profile_requests,
        device.update(_BIGGEST_ROUND, _BIGGEST_INDEX),
        topics.profile(_NONCE).blob_chunk(_SHA256, _BIGGEST_INDEX),
    )


def find_exceeded_limits(
    hosted: HostedLimits,
    *,
    federation: str,
    limits: Limits,
    address: Address,
    subscribe_batch: int = 8,
    traffic: TrafficEstimate | None = None,
) -> Iterator[str]:
    """Yield one text for each limit of the broker that the federation exceeds, with a remedy. Does not connect.

    Args:
        hosted: Limits of the broker.
        federation: Name of the federation.
        limits: Message sizes and windows of the federation.
        address: Address of the broker, which sets the style of client ids.
        subscribe_batch: Topic filters in one SUBSCRIBE packet.
        traffic: Expected traffic of a round, or None to skip its checks.
    """
    yield from _check_names(hosted, federation, address)
    if limits.chunk_bytes > hosted.payload_bytes:
        yield (
            f"limits.chunk_bytes is {limits.chunk_bytes}, and {hosted.name} takes {hosted.payload_bytes} bytes a message: "
            f"set it to {hosted.payload_bytes} or less"
        )
    if limits.max_inflight > hosted.unacknowledged:
        yield (
            f"limits.max_inflight is {limits.max_inflight}, and {hosted.name} takes {hosted.unacknowledged} messages "
            "before it answered the first: lower it"
        )
    if subscribe_batch > hosted.filters_per_subscribe:
        yield f"{subscribe_batch} filters in a SUBSCRIBE, and {hosted.name} takes {hosted.filters_per_subscribe}"
    if limits.fetch_window + _STANDING > hosted.subscriptions:
        yield (
            f"limits.fetch_window is {limits.fetch_window}, and with {_STANDING} others {hosted.name} takes "
            f"{hosted.subscriptions} subscriptions of a client: lower it"
        )
    if not address.secure:
        yield f"{hosted.name} takes TLS only: set broker.tls, or ca_file, cert_file and key_file"
    if traffic is not None:
        yield from _check_traffic(hosted, traffic)


def _check_names(hosted: HostedLimits, federation: str, address: Address) -> Iterator[str]:
    for topic in longest_topics(federation):
        if topic.count("/") > hosted.topic_slashes or len(topic) > hosted.topic_bytes:
            yield (
                f"topic {topic[:80]}... has {topic.count('/')} slashes and {len(topic)} bytes, and {hosted.name} takes "
                f"{hosted.topic_slashes} and {hosted.topic_bytes}"
            )
    longest = client_id(b"", "device", federation, _LONGEST_NAME, style=address.client_ids)
    if len(longest) > hosted.client_id_bytes:
        yield f"client id {longest!r} is longer than the {hosted.client_id_bytes} bytes of {hosted.name}"
    if address.client_ids == "short":
        yield (
            "broker.client_ids is short: a policy cannot tell from such an id whose it is; set it to full, and add "
            "?client-ids=full to the broker's address on devices"
        )
    if len(f"edgefl:device:{federation}:") >= hosted.client_id_bytes - len("pi"):
        yield f"federation {federation!r} leaves no room for a device's name in a client id"
    for role in ROLES:
        policy = json.dumps(
            json.loads(aws_policy(AccessRules(federation), role, _PLACE)), separators=(",", ":")
        )
        characters = len("".join(policy.split()))
        if characters > hosted.policy_characters:
            yield (
                f"the policy of the {role} has {characters} characters, and {hosted.name} takes {hosted.policy_characters}: "
                "give the federation a shorter name"
            )


def _check_traffic(hosted: HostedLimits, traffic: TrafficEstimate) -> Iterator[str]:
    if traffic.announcement_bytes > hosted.payload_bytes:
        yield (
            f"the announcement of a round takes about {traffic.announcement_bytes} bytes, and {hosted.name} takes "
            f"{hosted.payload_bytes} a message: use fewer units or tiers, or larger chunks where the broker takes them"
        )
    if traffic.round_messages > hosted.publishes_s:
        seconds = traffic.round_messages / hosted.publishes_s
        yield (
            f"a round publishes {traffic.round_messages} messages at once, and {hosted.name} takes {hosted.publishes_s} a "
            f"second of a client: it will refuse some, or need {seconds:.0f} s; send less (`downlink.encoding`, a smaller "
            "model), or use a broker of your own"
        )
