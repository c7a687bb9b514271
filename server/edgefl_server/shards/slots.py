"""Which worker takes the updates of which device.

A device's shard follows from its name alone, so it is the same whatever the number of workers: a run that goes on with more
of them, or without any, takes what devices computed before.
"""

from __future__ import annotations

from zlib import crc32

SHARDS = 64
"""Of a federation; workers share them out, so there are no more workers than that."""


def shard_of(device: str) -> int:
    """The shard of a device, from 0."""
    return crc32(device.encode()) % SHARDS


def shards_of(worker: int, workers: int) -> range:
    """Those of worker number ``worker``, from 0."""
    return range(worker, SHARDS, workers)


def worker_of(device: str, workers: int) -> int:
    """The number of the worker that takes a device's updates."""
    return shard_of(device) % workers
