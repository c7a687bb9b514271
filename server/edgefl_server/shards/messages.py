"""Messages between the server and its aggregation workers, and the shards by which devices are divided among them.

The shard of a device follows from its name, so it does not depend on the number of workers. A run that continues with
another number of workers accepts updates of tasks sent before.
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
    """Command: receive the updates of a round. ``opened`` has only the tasks of this worker's devices; ``keys`` are
    their keys.
    """

    opened: OpenRound
    spec: RoundAggregationSpec
    keys: Keys


class UpdateKeys(msgspec.Struct, frozen=True):
    """Command: replace the keys of devices. None removes a device."""

    keys: Mapping[str, tuple[DeviceKey, ...] | None]


class DeviceDeclined(msgspec.Struct, frozen=True):
    """Command: a device will send no update for the open round."""

    device: str


class End(msgspec.Struct, frozen=True):
    """Command: the round has ended. The worker answers with :class:`Summed`; ``summed`` is False if the sum is not
    needed.
    """

    round: int
    summed: bool


Command = Begin | UpdateKeys | DeviceDeclined | End | Stop

# -- messages of a worker ----------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True):
    """Message: the worker now receives updates of this round; 0 if no round is open.

    Earlier updates may be lost, so the server sends the open tasks of its devices again.
    """

    round: int


class UpdatesHandled(msgspec.Struct, frozen=True):
    """Message: results of received updates. ``replies`` are for devices, ``answers`` for the coordinator, ``events`` for
    people.

    Accepted updates are already in the journal.
    """

    round: int
    replies: tuple[Reply, ...] = ()
    answers: tuple[Answered | TurnLost, ...] = ()
    events: tuple[Event, ...] = ()


class Summed(msgspec.Struct, frozen=True):
    """Message: sum of a round's updates, and their :func:`digest`. The sum is None without updates, or if it was not
    requested.
    """

    round: int
    partial: PartialSum | None
    digest: str


class KeyRequest(msgspec.Struct, frozen=True):
    """Message: an unknown device sends updates. The server answers with its keys."""

    device: str


class StorageFailed(msgspec.Struct, frozen=True):
    """Message: the journal or the updates' bytes cannot be written. The worker receives nothing until that succeeds."""

    text: str


class RefusedCounts(msgspec.Struct, frozen=True):
    """Message: numbers of messages that were not read or stored since the worker began, by reason."""

    counts: Mapping[str, int]


WorkerMessage = Ready | UpdatesHandled | Summed | KeyRequest | StorageFailed | RefusedCounts | Died


class FromWorker(msgspec.Struct, frozen=True):
    """Message of a worker, tagged with its number. ``generation`` counts the processes that had this number."""

    worker: int
    generation: int
    message: WorkerMessage


def digest(digests: Mapping[str, str]) -> str:
    """Return one digest for a set of accepted updates, from the digest of each by device."""
    text = "\n".join(f"{device} {digests[device]}" for device in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
