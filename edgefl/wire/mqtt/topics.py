"""Topic names. ``edgefl/v1/<federation>/...``; the table is in docs/protocol.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgefl.wire.blobs import SHA256
from edgefl.wire.errors import ConfigError, ProtocolError

ROOT = "edgefl/v1"
ALL_ROUNDS = f"{ROOT}/+/rounds/current"
ALL_STATUSES = f"{ROOT}/+/devices/+/status"
"""What every federation on a broker announces, and whether its devices are there (:mod:`edgefl.wire.mqtt.neighbours`)."""
NO_SHARD = -1
"""Where updates have no shard."""
_NUMBER = re.compile(r"[0-9]{1,18}")  # int() would also take signs, spaces and other scripts
_NONCE = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def checked_name(kind: str, name: str) -> str:
    """``name`` if it may be part of a topic, else ConfigError. Wildcards and slashes must never get in."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} {name!r} is not usable: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit",
            kind=kind,
            name=name,
        )
    return name


@dataclass(frozen=True)
class DeviceTopics:
    """The topics of one device."""

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
        """Of a chunk; the task says whether there is a shard."""
        below = "updates" if shard == NO_SHARD else f"shards/{shard}"
        return self._of(f"{below}/{round_number}/{index}")


@dataclass(frozen=True)
class Topics:
    """The topics of one federation."""

    federation: str

    def __post_init__(self) -> None:
        checked_name("federation", self.federation)

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.federation}"

    @property
    def current_round(self) -> str:
        return f"{self.root}/rounds/current"

    def blob_chunk(self, sha256: str, index: int) -> str:
        return f"{self.root}/blobs/{sha256}/{index}"

    def device(self, device: str) -> DeviceTopics:
        return DeviceTopics(self.root, checked_name("device", device))

    def profile(self, nonce: str) -> ProfileTopics:
        """Where the blobs of a request for profiles lie: apart from those of rounds, which another process looks after."""
        return ProfileTopics(self.federation, nonce)

    @property
    def profile_filters(self) -> tuple[str, ...]:
        """What whoever asks for profiles subscribes to."""
        below = f"{self.root}/devices/+"
        return f"{below}/status", f"{below}/hello", f"{below}/profiles", f"{self.root}/profiles/+/offer"

    @property
    def server_filters(self) -> tuple[str, ...]:
        """What the server subscribes to: whether its announcement still stands, before all that devices have retained, and
        what its devices say."""
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
        """What a worker subscribes to that takes the updates of these shards."""
        return tuple(f"{self.root}/devices/+/shards/{shard}/+/+" for shard in shards)

    @property
    def update_filters(self) -> tuple[str, str]:
        """Filters for the updates of all devices: those for the server, and those for its workers."""
        return f"{self.root}/devices/+/updates/+/+", self.all_shards

    @property
    def all_shards(self) -> str:
        """The updates of all shards: what was computed for a server with workers also reaches one without."""
        return f"{self.root}/devices/+/shards/+/+/+"

    def parse_device(self, topic: str) -> tuple[str, str, tuple[int, ...]]:
        """(device, leaf, numbers) of a device topic: ``devices/<id>/updates/3/0`` -> (id, "updates", (3, 0))."""
        prefix = f"{self.root}/devices/"
        parts = topic.removeprefix(prefix).split("/")
        if not topic.startswith(prefix) or len(parts) < 2 or not _NAME.fullmatch(parts[0]):
            raise ProtocolError(f"topic {topic[:200]!r} is not a device topic of {self.root}", topic=topic)
        if not all(_NUMBER.fullmatch(part) for part in parts[2:]):
            raise ProtocolError(f"topic {topic[:200]!r} should end in numbers", topic=topic)
        return parts[0], parts[1], tuple(int(part) for part in parts[2:])

    def parse_blob(self, topic: str) -> tuple[str, int]:
        """(sha256, index) of a blob chunk topic."""
        prefix = f"{self.root}/blobs/"
        sha256, _, index = topic.removeprefix(prefix).partition("/")
        if not topic.startswith(prefix) or not SHA256.fullmatch(sha256) or not _NUMBER.fullmatch(index):
            raise ProtocolError(f"topic {topic[:200]!r} is not a blob chunk of {self.root}", topic=topic)
        return sha256, int(index)

    def parse_offer(self, topic: str) -> str:
        """The nonce of the request for profiles whose offer is on ``topic``."""
        nonce = topic.removeprefix(f"{self.root}/profiles/").removesuffix("/offer")
        if not _NONCE.fullmatch(nonce) or topic != self.profile(nonce).offer:
            raise ProtocolError(f"topic {topic[:200]!r} is not an offer of {self.root}", topic=topic)
        return nonce


@dataclass(frozen=True)
class ProfileTopics(Topics):
    """The topics of one request for profiles, whose ``nonce`` is lower-case hexadecimal digits."""

    nonce: str

    @property
    def below(self) -> str:
        return f"{self.root}/profiles/{self.nonce}"

    @property
    def offer(self) -> str:
        return f"{self.below}/offer"

    def blob_chunk(self, sha256: str, index: int) -> str:
        return f"{self.below}/blobs/{sha256}/{index}"
