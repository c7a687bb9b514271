"""Messages between the server and its workers, over a private pipe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.messages import Ack
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.coordinator.states import Answered, OpenRound, Rules, TurnLost
from edgefl_server.events import Event
from edgefl_server.identity.registry import DeviceKey
from edgefl_server.round_aggregation import RoundAggregationSpec

Keys = Mapping[str, tuple[DeviceKey, ...]]
"""All keys that devices of these names ever had, the oldest first."""


@dataclass(frozen=True)
class Told:
    """Settings of a worker: number ``worker`` of ``workers``, connected to the broker at ``address``.

    ``database`` is the journal's URL, ``updates`` where the bytes of updates go (a folder, or an fsspec URL). ``enrolled``:
    devices have to be on a list.
    """

    worker: int
    workers: int
    federation: str
    rules: Rules
    limits: Limits
    address: Address
    database: str
    updates: str
    enrolled: bool


# -- messages of the server --------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """Take the updates of a round, of which ``opened`` has the tasks of this worker's devices, with their ``keys``."""

    opened: OpenRound
    spec: RoundAggregationSpec
    keys: Keys


class Know(msgspec.Struct, frozen=True):
    """Keys of devices, as they are now; of one that is no device of the run: None."""

    keys: Mapping[str, tuple[DeviceKey, ...] | None]


class Declined(msgspec.Struct, frozen=True):
    """A device will send no update for the open round."""

    device: str


class End(msgspec.Struct, frozen=True):
    """The round has ended: return the sum of its updates, if ``summed``."""

    round: int
    summed: bool


class Stop(msgspec.Struct, frozen=True):
    """Stop the worker."""


Order = Begin | Know | Declined | End | Stop

# -- messages of a worker ----------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True):
    """The worker takes updates of that round now (0: there is none), and whatever was sent before may be lost: devices are
    to hear of their tasks (again)."""

    round: int


class Took(msgspec.Struct, frozen=True):
    """Results of updates: ``answers`` for the coordinator, ``acks`` for the devices, ``events`` for people.

    Accepted updates have been journaled.
    """

    round: int
    acks: tuple[tuple[str, Ack], ...] = ()
    answers: tuple[Answered | TurnLost, ...] = ()
    events: tuple[Event, ...] = ()


class Summed(msgspec.Struct, frozen=True):
    """Sum of the updates of a round, whose :func:`digest` is ``taken``; None without updates or without a request."""

    round: int
    partial: PartialSum | None
    taken: str


class WhoIs(msgspec.Struct, frozen=True):
    """An unknown device sends messages."""

    device: str


class Troubled(msgspec.Struct, frozen=True):
    """The journal, or the place of the bytes, cannot be written: nothing is taken until it can be."""

    text: str


class TurnedAway(msgspec.Struct, frozen=True):
    """Number of messages that were not read or not kept since the worker began, by reason."""

    counts: Mapping[str, int]


class Died(msgspec.Struct, frozen=True):
    """The worker has ended."""

    why: str


News = Ready | Took | Summed | WhoIs | Troubled | TurnedAway | Died


class FromWorker(msgspec.Struct, frozen=True):
    """``hired``: which of those that had this number one after the other said it."""

    worker: int
    hired: int
    news: News


def digest(taken: Mapping[str, str]) -> str:
    """Return one digest of the accepted updates, given by device: equal updates have equal digests."""
    text = "\n".join(f"{device} {taken[device]}" for device in sorted(taken))
    return hashlib.sha256(text.encode()).hexdigest()
