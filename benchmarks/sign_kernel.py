"""Speed of the GPU kernel that adds one-bit updates, beside a plain copy on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from edgefl.errors import ConfigError
from edgefl_server.aggregate.scatter import BLOCK, Integers

_GROUPS = 64
_COPIED = 1 << 31
"""Bytes of the copy that measures the bandwidth: far more than any cache holds."""


def measure_signs(
    parameters: int, clients: int, repeat: int = 10, device: str = "cuda", copied: int = _COPIED
) -> dict[str, Any]:
    """Measure the speed of adding one-bit updates that are generated on the device, and check some sums with numpy.

    Args:
        parameters: Entries of the model.
        clients: Number of updates.
        repeat: Runs of each measurement; medians are returned.
        device: Torch device.
        copied: Bytes of the copy that is measured for comparison.

    Returns:
        Seconds and rates, for the tuning that the server uses. ``bytes`` counts every packed byte once, and 8
        bytes read and 8 bytes written per parameter. ``copy_bytes_per_s`` is the rate of a copy on the device,
        reads and writes counted, and ``copy_fraction`` the ratio of both rates. ``tunings`` has the seconds of
        each alternative.

    Raises:
        ConfigError: If the device or triton is missing.
        RuntimeError: If sums differ from numpy's.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise _cannot_measure("CUDA")
    try:
        from edgefl_server.aggregate.triton_kernels import Tuning, add_signs
    except ImportError:
        raise _cannot_measure("triton") from None
    where = torch.device(device)
    codes, values, blocks = _draw(parameters, clients, where)
    sums = torch.zeros(parameters, dtype=torch.int64, device=where)
    index = torch.zeros(1, dtype=torch.int64, device=where)
    seconds = {}
    for tuning in (Tuning(), Tuning(registers=None), Tuning(64, 2), Tuning(64, 2, None), Tuning(256, 8)):
        call = partial(add_signs, codes, values, blocks, index, sums, tuning)
        seconds[tuning] = _seconds(call, repeat, where)
    _compare(sums, codes, values, blocks, launches=len(seconds) * (repeat + 1))
    chosen = seconds[Tuning()]
    moved = clients * -(-parameters // 8) + 16 * parameters
    copy = 2 * copied / _copy_seconds(copied, repeat, where)
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else device,
        "parameters": parameters,
        "clients": clients,
        "updates_per_s": clients / chosen,
        "bytes": moved,
        "seconds": chosen,
        "copy_bytes_per_s": copy,
        "copy_fraction": moved / chosen / copy,
        "tunings": {str(tuning): duration for tuning, duration in seconds.items()},
    }


def _cannot_measure(missing: str) -> ConfigError:
    return ConfigError(
        f"measuring a GPU needs CUDA and triton, found no {missing}; run it where there are both, or choose device cpu",
        missing=missing,
    )


def _draw(parameters: int, clients: int, device: torch.device) -> tuple[torch.Tensor, Integers, torch.Tensor]:
    """Return random one-bit updates for a measurement, as (codes, values, blocks).

    They are uint8 [clients, bytes] on the device, int64 [clients, groups, 2] fixed-point values of bit 0 and bit 1,
    and int64 [blocks, 5].
    """
    row = (-(-parameters // 32) + 1) * 4
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randint(256, (clients, row), dtype=torch.uint8, device=device, generator=generator)
    scales = np.random.default_rng(0).integers(1, 1 << 40, (clients, _GROUPS, 1))
    first = torch.arange(0, parameters, BLOCK, device=device)
    blocks = torch.stack(
        [
            first,
            (parameters - first).clamp(max=BLOCK),
            torch.zeros_like(first),
            first * _GROUPS // parameters,
            first,
        ],
        1,
    )
    return codes, np.concatenate([-scales, scales], 2), blocks


def _seconds(call: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Return the median duration of ``repeat`` calls in seconds, after one call that compiles."""
    call()
    durations = []
    for _ in range(repeat):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        durations.append(time.perf_counter() - start)
    return median(durations)


def _copy_seconds(size: int, repeat: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds(partial(target.copy_, source), repeat, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(
    sums: torch.Tensor, codes: torch.Tensor, values: Integers, blocks: torch.Tensor, launches: int
) -> None:
    """Raise RuntimeError unless three blocks of ``sums`` hold ``launches`` times the sums that numpy computes.

    The first, the middle and the last block are compared.
    """
    for number in (0, len(blocks) // 2, len(blocks) - 1):
        first, length, _, row, _ = blocks[number].tolist()
        packed = codes[:, first // 8 : (first + length + 7) // 8].cpu().numpy()
        bits = np.unpackbits(packed, axis=1, count=length, bitorder="little")
        expected = np.where(bits, values[:, row, 1:], values[:, row, :1]).sum(0) * launches
        if not np.array_equal(sums[first : first + length].cpu().numpy(), expected):
            raise RuntimeError(
                f"the sums of block {number} are not what numpy adds up; report this device and driver"
            )
