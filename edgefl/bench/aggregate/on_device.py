"""One bit per entry from updates that lie in the GPU's memory: what the kernel does, without the way there.

The command ``edgefl bench aggregate --device cuda --on-device --parameters 1000000000 --clients 64``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.aggregate.cuda import measure_signs

CODEC = "fedbat"
_BYTES = 8
"""Of a sum."""


class OnDeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """As :class:`edgefl.bench.aggregate.rows.AggregateRow`, of the sums alone, all ``clients`` in one batch; medians.

    Flower, which has no way to average on a GPU, has no part in it. ``gpu`` is its name, ``tunings`` the seconds of each
    way in which the kernel can be launched; ``seconds`` is that of the one the server uses.
    """

    codec: str
    device: str
    parameters: int
    clients: int
    updates_per_s: float
    flower_updates_per_s: float | None
    ratio: float | None
    copy_fraction: float
    seconds: float
    update_bytes: int
    counted_bytes: int
    copy_bytes_per_s: float
    repeat: int
    gpu: str
    tunings: dict[str, float]


def measure(parameters: int, clients: int, repeat: int) -> OnDeviceRow:
    """The row. ConfigError where there is no CUDA or no triton."""
    return row_of(measure_signs(parameters, clients, repeat=repeat), repeat)


def row_of(found: Mapping[str, Any], repeat: int) -> OnDeviceRow:
    """What :func:`server.aggregate.cuda.measure_signs` found, as a row."""
    parameters, clients = found["parameters"], found["clients"]
    return OnDeviceRow(
        codec=CODEC,
        device="cuda",
        parameters=parameters,
        clients=clients,
        updates_per_s=round(found["updates_per_s"], 2),
        flower_updates_per_s=None,
        ratio=None,
        copy_fraction=round(found["copy_fraction"], 4),
        seconds=round(found["seconds"], 6),
        update_bytes=(found["bytes"] - 2 * _BYTES * parameters) // clients,
        counted_bytes=found["bytes"],
        copy_bytes_per_s=round(found["copy_bytes_per_s"]),
        repeat=repeat,
        gpu=found["device"],
        tunings=dict(found["tunings"]),
    )
