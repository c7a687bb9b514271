"""Read and write rules for the topics of a federation: the table in docs/protocol.md as data.

A device's user is its name, so ``{user}`` in a filter ties a topic to a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edgefl.wire.mqtt.topics import Topics

Role = Literal["server", "asker", "device"]
ROLES: tuple[Role, ...] = ("server", "asker", "device")
USER = "{user}"


@dataclass(frozen=True)
class TopicRule:
    """Permission of one role at one topic filter: to subscribe (``read``), to publish (``write``), or both."""

    role: Role
    filter: str
    read: bool
    write: bool


@dataclass(frozen=True)
class AccessRules:
    """Access rules of one federation.

    Attributes:
        federation: Name of the federation.
        server: User name of the server at the broker.
        asker: User name of the client that requests profiles from devices. Every other user is a device.
    """

    federation: str
    server: str = "server"
    asker: str = "asker"

    def __post_init__(self) -> None:
        Topics(self.federation)  # refuses a name that is a wildcard

    @property
    def root(self) -> str:
        """First levels of all topics of the federation, without a slash at the end."""
        return Topics(self.federation).root

    def of(self, role: Role) -> Iterator[TopicRule]:
        """Yield the rules of ``role``, with full topic filters.

        Filters of devices contain the placeholder :data:`USER` instead of a device's name.
        """
        rules = {"server": _SERVER, "asker": _ASKER, "device": _DEVICE}[role]
        for leaf, may in rules:
            yield TopicRule(role, f"{self.root}/{leaf}", "r" in may, "w" in may)


_Leaves = Sequence[tuple[str, str]]
_SERVER: _Leaves = (
    ("rounds/current", "rw"),
    ("blobs/+/+", "w"),
    ("devices/+/status", "r"),
    ("devices/+/hello", "r"),
    ("devices/+/progress", "r"),
    # It writes to erase what devices leave retained.
    ("devices/+/updates/+/+", "rw"),
    ("devices/+/shards/+/+/+", "rw"),
    ("devices/+/declines", "r"),
    ("devices/+/tasks", "w"),
    ("devices/+/acks", "w"),
)
_ASKER: _Leaves = (
    ("devices/+/status", "r"),
    ("devices/+/hello", "r"),
    ("devices/+/profiles", "r"),
    ("devices/+/profile-requests", "w"),
    ("profiles/+/offer", "rw"),
    ("profiles/+/blobs/+/+", "w"),
)
_DEVICE: _Leaves = (
    ("rounds/current", "r"),
    ("blobs/+/+", "r"),
    ("profiles/+/offer", "r"),
    ("profiles/+/blobs/+/+", "r"),
    (f"devices/{USER}/tasks", "r"),
    (f"devices/{USER}/acks", "r"),
    (f"devices/{USER}/profile-requests", "r"),
    (f"devices/{USER}/status", "w"),
    (f"devices/{USER}/hello", "w"),
    (f"devices/{USER}/progress", "w"),
    (f"devices/{USER}/updates/+/+", "w"),
    (f"devices/{USER}/shards/+/+/+", "w"),
    (f"devices/{USER}/declines", "w"),
    (f"devices/{USER}/profiles", "w"),
)
