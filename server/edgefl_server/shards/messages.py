"""Messages between the server and its aggregation workers, over a private connection, and the shards they are dealt by.

A device's shard follows from its name alone, so it is the same for any number of workers: a run that continues with more
workers, or without any, receives what devices computed before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from zlib import crc32

import msgspec

from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.coordinator.states import Answered, OpenRound, TurnLost
from edgefl_server.events import Event
from edgefl_server.identity.registry import DeviceKey
from edgefl_server.round_aggregation import RoundAggregationSpec
from edgefl_server.updates.receiver import Reply
from edgefl_server.workers.protocol import Died, Stop

SHARDS = 64
"""Shards of a federation, and so the largest number of workers."""

Keys = Mapping[str, tuple[DeviceKey, ...]]
"""All keys that devices of these names ever had, the oldest first."""


def shard_of(device: str) -> int:
    """Return the shard of a device, from 0."""
    return crc32(device.encode()) % SHARDS


def shards_of(worker: int, workers: int) -> range:
    """Return the shards of worker number ``worker``, from 0."""
    return range(worker, SHARDS, workers)


def worker_of(device: str, workers: int) -> int:
    """Return the number of the worker that receives a device's updates."""
    return shard_of(device) % workers


# -- commands of the server --------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """Receive the updates of a round. ``opened`` has the tasks of this worker's devices only, with their ``keys``."""

    opened: OpenRound
    spec: RoundAggregationSpec
    keys: Keys


class UpdateKeys(msgspec.Struct, frozen=True):
    """Replace the keys of devices. None: the name is no device of the run."""

    keys: Mapping[str, tuple[DeviceKey, ...] | None]


class DeviceDeclined(msgspec.Struct, frozen=True):
    """A device will send no update for the open round."""

    device: str


class End(msgspec.Struct, frozen=True):
    """The round has ended: return the sum of its updates if ``summed``."""

    round: int
    summed: bool


Command = Begin | UpdateKeys | DeviceDeclined | End | Stop

# -- messages of a worker ----------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True):
    """The worker receives updates of that round now (0: no round is open).

    Earlier updates may be lost, so the server sends the open tasks of its devices again.
    """

    round: int


class Progressed(msgspec.Struct, frozen=True):
    """Results of updates: ``answers`` for the coordinator, ``replies`` for devices, ``events`` for people.

    Accepted updates are in the journal.
    """

    round: int
    replies: tuple[Reply, ...] = ()
    answers: tuple[Answered | TurnLost, ...] = ()
    events: tuple[Event, ...] = ()


class Summed(msgspec.Struct, frozen=True):
    """Sum of a round's updates, and their :func:`digest`. The sum is None without updates, or if it was not requested."""

    round: int
    partial: PartialSum | None
    digest: str


class KeyRequest(msgspec.Struct, frozen=True):
    """An unknown device sends messages: return its keys."""

    device: str


class StorageFailed(msgspec.Struct, frozen=True):
    """The journal or the updates' bytes cannot be written. The worker receives nothing until they can be."""

    text: str


class RefusedCounts(msgspec.Struct, frozen=True):
    """Numbers of messages that were not read or stored since the worker began, by reason."""

    counts: Mapping[str, int]


WorkerMessage = Ready | Progressed | Summed | KeyRequest | StorageFailed | RefusedCounts | Died


class FromWorker(msgspec.Struct, frozen=True):
    """Message of a worker. ``generation`` distinguishes the workers that had this number one after the other."""

    worker: int
    generation: int
    message: WorkerMessage


def digest(digests: Mapping[str, str]) -> str:
    """Return one digest of the accepted updates, given by device: equal updates have equal digests."""
    text = "\n".join(f"{device} {digests[device]}" for device in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
