"""Topic names ``edgefl/v1/<federation>/...`` (table in docs/protocol.md), and the size of a PUBLISH packet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgefl.errors import ConfigError, ProtocolError
from edgefl.wire.blobs import SHA256

ROOT = "edgefl/v1"
ALL_ROUNDS = f"{ROOT}/+/rounds/current"
ALL_STATUSES = f"{ROOT}/+/devices/+/status"
"""Topic filters for the announcements and device states of all federations (:mod:`edgefl.wire.mqtt.neighbours`)."""
NO_SHARD = -1
"""Shard number of updates without a shard."""
_NUMBER = re.compile(r"[0-9]{1,18}")  # int() would also take signs, spaces and other scripts
_NONCE = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def checked_name(kind: str, name: str) -> str:
    """Return ``name`` unchanged if it can be part of a topic.

    Args:
        kind: Kind of the name, for the error text.
        name: Name of a federation or device.

    Raises:
        ConfigError: The name has other characters than letters, digits, ``.``, ``_`` and ``-``, or is too long.
            Wildcards and slashes would match topics of others.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} {name!r} is not usable: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit",
            kind=kind,
            name=name,
        )
    return name


@dataclass(frozen=True)
class DeviceTopics:
    """Topics of one device.

    Attributes:
        root: Common prefix of the federation's topics.
        device: Name of the device.
    """

    root: str
    device: str

    def _of(self, leaf: str) -> str:
        return f"{self.root}/devices/{self.device}/{leaf}"

    @property
    def status(self) -> str:
        return self._of("status")

    @property
    def hello(self) -> str:
        return self._of("hello")

    @property
    def progress(self) -> str:
        return self._of("progress")

    @property
    def tasks(self) -> str:
        return self._of("tasks")

    @property
    def acks(self) -> str:
        return self._of("acks")

    @property
    def declines(self) -> str:
        return self._of("declines")

    @property
    def profile_requests(self) -> str:
        return self._of("profile-requests")

    @property
    def profiles(self) -> str:
        return self._of("profiles")

    def update(self, round_number: int, index: int, shard: int = NO_SHARD) -> str:
        """Return the topic of a chunk of an update.

        Args:
            round_number: Number of the round.
            index: Number of the chunk.
            shard: Shard that the task names, or :data:`NO_SHARD`.
        """
        below = "updates" if shard == NO_SHARD else f"shards/{shard}"
        return self._of(f"{below}/{round_number}/{index}")


@dataclass(frozen=True)
class Topics:
    """MQTT topics of one federation: names to publish on, and filters to subscribe to."""

    federation: str

    def __post_init__(self) -> None:
        checked_name("federation", self.federation)

    @property
    def root(self) -> str:
        """Common prefix of the federation's topics."""
        return f"{ROOT}/{self.federation}"

    @property
    def current_round(self) -> str:
        """Topic of the announcement of the current round."""
        return f"{self.root}/rounds/current"

    @property
    def probe(self) -> str:
        """Topic on which a server tests the broker, among the updates that it may read and erase. Rounds begin at 1."""
        return f"{self.root}/devices/edgefl-probe/updates/0/0"

    def blob_chunk(self, sha256: str, index: int) -> str:
        """Return the topic of chunk ``index`` of a blob."""
        return f"{self.root}/blobs/{sha256}/{index}"

    def device(self, device: str) -> DeviceTopics:
        """Return the topics of a device. Raises ConfigError if its name cannot be part of a topic."""
        return DeviceTopics(self.root, checked_name("device", device))

    def profile(self, nonce: str) -> ProfileTopics:
        """Return the topics of the profile request ``nonce``.

        Its blobs have other topics than those of rounds, because another process publishes them.
        """
        return ProfileTopics(self.federation, nonce)

    @property
    def profile_filters(self) -> tuple[str, ...]:
        """Topic filters of a process that requests profiles."""
        below = f"{self.root}/devices/+"
        return f"{below}/status", f"{below}/hello", f"{below}/profiles", f"{self.root}/profiles/+/offer"

    @property
    def server_filters(self) -> tuple[str, ...]:
        """Topic filters of the server. Its own announcement is first, so that it arrives before the devices' retained
        messages.
        """
        below = f"{self.root}/devices/+"
        return (
            self.current_round,
            f"{below}/status",
            f"{below}/hello",
            f"{below}/progress",
            f"{below}/updates/+/+",
            f"{below}/declines",
        )

    def shard_filters(self, shards: Iterable[int]) -> tuple[str, ...]:
        """Return the topic filters of a worker that receives the updates of ``shards``."""
        return tuple(f"{self.root}/devices/+/shards/{shard}/+/+" for shard in shards)

    @property
    def update_filters(self) -> tuple[str, str]:
        """Topic filters for the updates of all devices: without a shard, and with any shard."""
        return f"{self.root}/devices/+/updates/+/+", self.all_shards

    @property
    def all_shards(self) -> str:
        """Topic filter for the updates of all shards. A server without workers also needs it, for tasks sent while it had
        workers.
        """
        return f"{self.root}/devices/+/shards/+/+/+"

    def parse_device(self, topic: str) -> tuple[str, str, tuple[int, ...]]:
        """Return (device, kind of message, numbers) from the topic of a device's message.

        For example, ``devices/<id>/updates/3/0`` becomes (id, "updates", (3, 0)).

        Raises:
            ProtocolError: It is no such topic, or its last parts are no numbers.
        """
        prefix = f"{self.root}/devices/"
        parts = topic.removeprefix(prefix).split("/")
        if not topic.startswith(prefix) or len(parts) < 2 or not _NAME.fullmatch(parts[0]):
            raise ProtocolError(f"topic {topic[:200]!r} is not a device topic of {self.root}", topic=topic)
        if not all(_NUMBER.fullmatch(part) for part in parts[2:]):
            raise ProtocolError(f"topic {topic[:200]!r} should end in numbers", topic=topic)
        return parts[0], parts[1], tuple(int(part) for part in parts[2:])

    def parse_blob(self, topic: str) -> tuple[str, int]:
        """Return (SHA-256 of the blob, index of the chunk) from the topic of a blob's chunk.

        Raises:
            ProtocolError: It is no such topic.
        """
        prefix = f"{self.root}/blobs/"
        sha256, _, index = topic.removeprefix(prefix).partition("/")
        if not topic.startswith(prefix) or not SHA256.fullmatch(sha256) or not _NUMBER.fullmatch(index):
            raise ProtocolError(f"topic {topic[:200]!r} is not a blob chunk of {self.root}", topic=topic)
        return sha256, int(index)

    def parse_offer(self, topic: str) -> str:
        """Return the nonce in the topic of a profile request's offer.

        Raises:
            ProtocolError: It is no such topic.
        """
        nonce = topic.removeprefix(f"{self.root}/profiles/").removesuffix("/offer")
        if not _NONCE.fullmatch(nonce) or topic != self.profile(nonce).offer:
            raise ProtocolError(f"topic {topic[:200]!r} is not an offer of {self.root}", topic=topic)
        return nonce


@dataclass(frozen=True)
class ProfileTopics(Topics):
    """Topics of one profile request. Its :meth:`blob_chunk` returns topics below the request.

    Attributes:
        nonce: Identifier of the request; lower-case hexadecimal digits.
    """

    nonce: str

    @property
    def below(self) -> str:
        """Common prefix of the request's topics."""
        return f"{self.root}/profiles/{self.nonce}"

    @property
    def offer(self) -> str:
        """Topic of the request's :class:`~edgefl.wire.mqtt.messages.ProfileOffer`."""
        return f"{self.below}/offer"

    def blob_chunk(self, sha256: str, index: int) -> str:
        return f"{self.below}/blobs/{sha256}/{index}"


_VARINT = 128


@dataclass(frozen=True)
class PublishTraffic:
    """Bytes of PUBLISH packets. TCP, TLS and acknowledgements are excluded.

    Attributes:
        payload: Bytes of the payloads.
        wire: Bytes of the packets, MQTT headers included.
    """

    payload: int = 0
    wire: int = 0

    def __add__(self, other: PublishTraffic) -> PublishTraffic:
        return PublishTraffic(self.payload + other.payload, self.wire + other.wire)

    @classmethod
    def of(cls, topic: str, payload: int, qos: int) -> PublishTraffic:
        """Return the traffic of one message with a payload of ``payload`` bytes."""
        return cls(payload, publish_bytes(topic, payload, qos))


def publish_bytes(topic: str, payload: int, qos: int) -> int:
    """Return the size in bytes of a PUBLISH packet (MQTT 3.1.1, 3.3).

    It consists of type and flags, the remaining length in 7 bits per byte, the topic after its length in 2 bytes, and
    the payload. Above QoS 0 a packet identifier of 2 bytes precedes the payload.

    Args:
        topic: MQTT topic.
        payload: Bytes of the payload.
        qos: QoS level.
    """
    rest = 2 + len(topic.encode()) + (2 if qos else 0) + payload
    digits = 1
    while rest >= _VARINT**digits:
        digits += 1
    return 1 + digits + rest
