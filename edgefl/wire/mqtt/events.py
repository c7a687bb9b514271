"""What a session tells: each of these arrives in its inbox, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgefl.wire.errors import BrokerError
from edgefl.wire.mqtt.address import Address


@dataclass(frozen=True)
class Will:
    """What the broker says for us (retained) when we vanish."""

    topic: str
    payload: bytes


@dataclass(frozen=True)
class Up:
    """Connected. ``resumed`` is false when the broker knew nothing of us: publish and ask again."""

    resumed: bool


@dataclass(frozen=True)
class Down:
    """Not connected; a new attempt follows in ``retry_s`` seconds.

    ``rival``: connections are made and ended by the broker within moments, one after the other. MQTT 3.1.1 has no word for
    it (MQTT 5 has, and ``reason`` tells), but this is what happens where two clients have one id: each takes the other's
    place. ``limit``: the broker ends each connection at a message of ours; the limit and what to do. ``waiting``: the
    connection is made, and the broker has not answered yet.
    """

    reason: str
    retry_s: float
    rival: bool = False
    limit: str = ""
    waiting: bool = False


@dataclass(frozen=True)
class Incoming:
    """A message that arrived. ``retained``: it lay at the broker, and came because we subscribed."""

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Refused:
    """The broker will not do for us what we asked. A broker of MQTT 3.1.1 refuses subscriptions only, and silently drops
    what we may not publish. ``limit``: the limit of the broker that the message exceeds, and what to do."""

    action: Literal["subscribe", "unsubscribe", "publish"]
    topic: str
    reason: str
    limit: str = ""
    waiting: bool = False

    def text(self, address: Address) -> str:
        """For people: the topic, the reason, and what to do."""
        if self.limit:
            return f"the broker at {address} {self.limit}"
        who = f"user {address.username!r}" if address.username else "this client"
        may = "write to" if self.action == "publish" else "read"
        return (
            f"the broker at {address} refuses to {self.action} {self.topic}: {self.reason}; its access list has to let "
            f"{who} {may} it (`edgefl acl` writes one)"
        )


@dataclass(frozen=True)
class Woken:
    """Something in this process changed: whoever reads the events looks around (:meth:`Session.wake`)."""


def check_limit(event: object, address: Address) -> None:
    """Raise BrokerError if ``event`` names a limit of the broker: no retry passes it."""
    if isinstance(event, Down | Refused) and event.limit:
        raise BrokerError(f"the broker at {address} {event.limit}")


Event = Up | Down | Incoming | Refused | Woken
