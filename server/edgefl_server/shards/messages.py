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
    """Return the shard of a device: a number from 0 to ``SHARDS - 1`` that depends only on its name."""
    return crc32(device.encode()) % SHARDS


def shards_of(worker: int, workers: int) -> range:
    """Return the shards whose devices are received by worker number ``worker`` (from 0) of ``workers``."""
    return range(worker, SHARDS, workers)


def worker_of(device: str, workers: int) -> int:
    """Return the number (from 0) of the worker, among ``workers``, that receives a device's updates."""
    return shard_of(device) % workers


# -- commands of the server --------------------------------------------------------------------------------------


class BeginRound(msgspec.Struct, frozen=True):
    """Command: receive the updates of a round.

    Attributes:
        opened: The round, with only the tasks of this worker's devices.
        spec: Settings for the sums of its updates.
        keys: All keys of these devices, by device.
    """

    opened: OpenRound
    spec: RoundAggregationSpec
    keys: Keys


class UpdateKeys(msgspec.Struct, frozen=True):
    """Command: replace the keys of the devices ``keys``. None removes a device, whose updates are then refused as
    unknown.
    """

    keys: Mapping[str, tuple[DeviceKey, ...] | None]


class DeviceDeclined(msgspec.Struct, frozen=True):
    """Command: ``device`` declined its task and will send no update for the open round."""

    device: str


class EndRound(msgspec.Struct, frozen=True):
    """Command: the round has ended. The worker answers with :class:`RoundSum`.

    ``summed`` is False if the sum is not needed, because the round was abandoned.
    """

    round: int
    summed: bool


Command = BeginRound | UpdateKeys | DeviceDeclined | EndRound | Stop

# -- messages of a worker ----------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True):
    """Message: the worker now receives updates of this round; 0 if no round is open.

    Messages sent before may be lost, so the server sends the open tasks of the worker's devices again.
    """

    round: int


class UpdatesHandled(msgspec.Struct, frozen=True):
    """Message: results of received updates of one round. Accepted updates are already in the journal.

    Attributes:
        round: Number of the round.
        replies: Acknowledgements to send to devices.
        answers: Results for the coordinator.
        events: Events for people.
    """

    round: int
    replies: tuple[Reply, ...] = ()
    answers: tuple[Answered | TurnLost, ...] = ()
    events: tuple[Event, ...] = ()


class RoundSum(msgspec.Struct, frozen=True):
    """Message: the worker's sum of a round.

    Attributes:
        round: Number of the round.
        partial: The sum; None without updates, or if it was not requested.
        digest: :func:`digest` of the updates in the sum.
    """

    round: int
    partial: PartialSum | None
    digest: str


class KeyRequest(msgspec.Struct, frozen=True):
    """Message: the worker received an update of a device whose keys it lacks.

    The server answers with :class:`UpdateKeys`.
    """

    device: str


class StorageFailed(msgspec.Struct, frozen=True):
    """Message: the worker cannot write the journal or the updates' bytes. ``text`` is the reason.

    The worker receives no updates until a write succeeds; then it sends :class:`Ready`.
    """

    text: str


class RefusedCounts(msgspec.Struct, frozen=True):
    """Message: number of messages that the worker dropped unread since it began, by reason."""

    counts: Mapping[str, int]


WorkerMessage = Ready | UpdatesHandled | RoundSum | KeyRequest | StorageFailed | RefusedCounts | Died


class FromWorker(msgspec.Struct, frozen=True):
    """Message of a worker, with the worker's number. ``generation`` counts the processes that had this number so far."""

    worker: int
    generation: int
    message: WorkerMessage


def digest(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for a set of accepted updates. ``digests`` has the SHA-256 of each update, by device."""
    text = "\n".join(f"{device} {digests[device]}" for device in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
