"""The sums on a torch device, from updates of any form: one bit per entry by Triton where it runs, the rest by torch.

float64 and int64 arithmetic follow IEEE 754 there too, and integers are added, so every device gives the bits that the
processor gives. A batch lies on the device as it travelled; no dense update is built. To measure a GPU ::

    python -c "from server.aggregate.cuda import measure_signs; print(measure_signs(10**9, 64))"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgefl.system.spare import Spare
from edgefl.wire.errors import ConfigError
from edgefl.wire.update.form import Codes
from server.aggregate.accumulator import Ended, Renewal
from server.aggregate.adders import Checked, Waiting, code_values
from server.aggregate.scatter import BLOCK, SOURCE, Integers, Pieces
from server.aggregate.threads import Call
from server.aggregate.torch_batches import Batch, reader_of, slabs

try:
    from server.aggregate import triton_kernels
except ImportError:  # there is no triton for this platform
    triton_kernels = None  # type: ignore[assignment]


class TorchAccumulator:
    """Sums on ``device``. ``triton``: whether one bit per entry goes through Triton; None: on CUDA, if it is installed."""

    def __init__(self, size: int, device: torch.device, triton: bool | None = None) -> None:
        self._device = device
        self.size = size
        self.spare = Spare()
        self._sums = torch.zeros(size, dtype=torch.int64, device=device)
        self._triton = triton_kernels is not None and device.type == "cuda" if triton is None else triton

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: npt.NDArray[np.float64]) -> None:
        batch = Batch(pieces, updates, self._device)
        for work in pieces.works:
            if not len(work.blocks):
                continue
            if self._triton and isinstance(work.encoding, Codes) and work.encoding.bits == 1:
                triton_kernels.add_signs(
                    batch.rows(int(work.blocks[0, SOURCE])),
                    code_values(pieces, work, updates, factors),
                    torch.from_numpy(work.blocks).to(self._device),
                    batch.index,
                    self._sums,
                )
                continue
            reader = reader_of(batch, work, factors)
            for slab in slabs(work, batch):
                part = torch.zeros_like(slab.target)
                for k in range(len(updates)):
                    part += reader.fixed(k, slab)
                self._sums[slab.target] += part  # regions name no entry twice

    def by_parts(self, pieces: Pieces) -> bool:
        """Never: a launch for each part would cost more than it saves."""
        return False

    def ended(self, batches: Sequence[Waiting]) -> Ended:
        return self.sums().__getitem__

    def renewing(
        self, batches: Sequence[Waiting], renewal: Renewal, weights: Integers, scale: float
    ) -> list[Call]:
        return []

    def sums(self) -> Integers:
        sums: Integers = self._sums.cpu().numpy()
        return sums

    def take(self, sums: Integers) -> None:
        self._sums += torch.tensor(sums).to(self._device)

    def reset(self) -> None:
        self._sums.zero_()


_GROUPS = 64
_COPIED = 1 << 31
"""Bytes of the copy that bandwidth is taken from: far more than any cache holds."""


def measure_signs(
    parameters: int, clients: int, repeat: int = 10, device: str = "cuda", copied: int = _COPIED
) -> dict[str, Any]:
    """Speed of adding one-bit updates of ``clients``, made on the device, to a model of so many ``parameters``.

    ``bytes`` counts every packed byte once, and eight per parameter read and eight written for the sums.
    ``copy_bytes_per_s`` is that of a copy within the device, reading and writing counted, and ``copy_fraction`` the
    share of it that the sums reach. All are medians of ``repeat``, with the tuning that the server uses;
    ``tunings`` has the seconds of each that could be used instead. The sums of some blocks are compared with numpy's.

    ConfigError where there is no such device or no triton.
    """
    if triton_kernels is None or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            "measuring a GPU needs CUDA and triton, found "
            f"{'no triton' if triton_kernels is None else 'no CUDA'}; run it where there are both, or choose device cpu"
        )
    where = torch.device(device)
    codes, values, blocks = _drawn(parameters, clients, where)
    sums = torch.zeros(parameters, dtype=torch.int64, device=where)
    index = torch.zeros(1, dtype=torch.int64, device=where)
    seconds = {}
    for tuning in triton_kernels.TUNINGS:
        call = partial(triton_kernels.add_signs, codes, values, blocks, index, sums, tuning)
        seconds[tuning] = _seconds(call, repeat, where)
    _compare(sums, codes, values, blocks, launches=len(seconds) * (repeat + 1))
    chosen = seconds[triton_kernels.Tuning()]
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


def _drawn(
    parameters: int, clients: int, device: torch.device
) -> tuple[torch.Tensor, Integers, torch.Tensor]:
    """Random bits of a model of contiguous tensors, each group's scales of every client, and the blocks."""
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
    """Median over ``repeat`` calls, after one that compiles."""
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
    """RuntimeError unless the first, the middle and the last block hold ``launches`` times what numpy adds up."""
    for number in (0, len(blocks) // 2, len(blocks) - 1):
        first, length, _, row, _ = blocks[number].tolist()
        packed = codes[:, first // 8 : (first + length + 7) // 8].cpu().numpy()
        bits = np.unpackbits(packed, axis=1, count=length, bitorder="little")
        expected = np.where(bits, values[:, row, 1:], values[:, row, :1]).sum(0) * launches
        if not np.array_equal(sums[first : first + length].cpu().numpy(), expected):
            raise RuntimeError(
                f"the sums of block {number} are not what numpy adds up; report this device and driver"
            )
