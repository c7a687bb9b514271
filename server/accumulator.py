"""Exact sums of fixed-point integers: numpy on the CPU, torch on CUDA; both give the same bits.

On the CPU numpy with reused scratch is the faster engine: torch's thread pool costs more than it gives when the
processor is shared, and fresh 2 MB temporaries cost page faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgefl.submodels.submodel import Positions, Region, local_shape, pieces
from edgefl.wire.tensors import Array

Floats = npt.NDArray[np.floating]
_MOST_RUNS = 1024  # beyond this, one indexed addition is cheaper than a loop over slices


@dataclass(frozen=True)
class Layout:
    """Where each global tensor lies in one flat buffer, in the order of the names."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    size: int


def layout_of(weights: Mapping[str, Array]) -> Layout:
    """The layout of a model's tensors; TypeError for a tensor that is not floating point."""
    shapes: dict[str, tuple[int, ...]] = {}
    offsets: dict[str, int] = {}
    size = 0
    for name in sorted(weights):
        if not np.issubdtype(weights[name].dtype, np.floating):
            raise TypeError(f"{name} is {weights[name].dtype}; only floating-point tensors can be averaged")
        shapes[name], offsets[name] = weights[name].shape, size
        size += weights[name].size
    return Layout(shapes, offsets, size)


def flatten(layout: Layout, weights: Mapping[str, Array]) -> Floats:
    """``weights`` in the order of ``layout``, as one array."""
    parts = [weights[name].reshape(-1) for name in layout.offsets]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


@dataclass(frozen=True)
class Coverage:
    """Which entries of the flat global buffer a submodel's tensors (concatenated by name) stand for.

    ``runs`` are (start in the submodel, start in the model, length) of stretches that stay contiguous;
    ``index`` (int64, one global position per entry) replaces them where slices cut too many pieces.
    """

    shapes: Mapping[str, tuple[int, ...]]
    size: int
    runs: tuple[tuple[int, int, int], ...]
    index: npt.NDArray[np.int64] | None


def cover(layout: Layout, regions: Mapping[str, Region]) -> Coverage:
    """Compile ``regions`` for ``layout``; KeyError for a tensor the model does not have."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: list[tuple[int, int, Positions | None]] = []  # (start in the model, entries, which of them)
    for name in sorted(regions):
        shapes[name] = local_shape(name, regions[name], layout.shapes)
        for part, positions in pieces(name, regions[name], layout.shapes):
            count = math.prod(layout.shapes[part]) if positions is None else positions.size
            parts.append((layout.offsets[part], count, positions))
    size = sum(count for _, count, _ in parts)
    # Neighbouring parts may join to one stretch, so there are at least this many.
    if sum(_pieces(positions) for _, _, positions in parts) - len(parts) > _MOST_RUNS:
        return Coverage(shapes, size, (), np.concatenate([_indexed(*part) for part in parts]))
    runs = _joined([run for part in parts for run in _stretches(*part)])
    return Coverage(shapes, size, tuple(runs), None)


def _pieces(positions: Positions | None) -> int:
    """How many contiguous stretches positions fall into."""
    return 1 if positions is None else 1 + int(np.count_nonzero(np.diff(positions) != 1))


def _indexed(start: int, count: int, positions: Positions | None) -> Positions:
    return start + (np.arange(count) if positions is None else positions)


def _stretches(start: int, count: int, positions: Positions | None) -> list[tuple[int, int]]:
    """(start in the model, length) of the contiguous parts, in local order."""
    if positions is None or not count:
        return [(start, count)] if count else []
    edges = np.concatenate(([0], np.flatnonzero(np.diff(positions) != 1) + 1, [count]))
    return list(zip((start + positions[edges[:-1]]).tolist(), np.diff(edges).tolist(), strict=True))


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start in the submodel, start in the model, length), neighbours as one."""
    runs: list[tuple[int, int, int]] = []
    size = 0
    for target, length in stretches:
        if runs and runs[-1][1] + runs[-1][2] == target:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((size, target, length))
        size += length
    return runs


class Accumulator(Protocol):
    """Integer sums and weights over a flat model of ``size`` entries."""

    def add(self, values: Floats, coverage: Coverage, weight: int, scale: float) -> None:
        """Add ``round(values * scale)`` and ``weight`` to the covered entries; to those only that differ from the base,
        where there is one."""

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """(sum / (weight * unit), weight > 0); the mean is undefined where the weight is 0."""


class CpuAccumulator:
    """The sums in numpy. Scratch is as large as the model, whatever the number of updates."""

    def __init__(self, size: int, base: Floats | None = None) -> None:
        self._base = base
        self._sum = np.zeros(size, np.int64)
        self._weight = np.zeros(size, np.int64)
        self._scaled = np.empty(size, np.float64)
        self._fixed = np.empty(size, np.int64)

    def add(self, values: Floats, coverage: Coverage, weight: int, scale: float) -> None:
        scaled, fixed = self._scaled[: values.size], self._fixed[: values.size]
        np.multiply(values, np.float64(scale), out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(fixed, scaled, casting="unsafe")
        if coverage.index is not None:
            self._add(coverage.index, values, fixed, weight)  # a region names no entry twice
        for start, target, length in coverage.runs:
            part = slice(start, start + length)
            self._add(slice(target, target + length), values[part], fixed[part], weight)

    def _add(self, at: Positions | slice, values: Floats, fixed: Positions, weight: int) -> None:
        if self._base is None:
            self._sum[at] += fixed
            self._weight[at] += weight
        else:
            changed = values != self._base[at]
            self._sum[at] += fixed * changed
            self._weight[at] += weight * changed

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        held = self._weight > 0
        weight = np.where(held, self._weight, 1)
        return self._sum.astype(np.float64) / (weight.astype(np.float64) * unit), held


class TorchAccumulator:
    """The sums on a torch device. float64 and int64 arithmetic follow IEEE 754 there too: same bits as numpy."""

    def __init__(self, size: int, device: torch.device, base: Floats | None = None) -> None:
        self._device = device
        self._base = None if base is None else torch.from_numpy(base).to(device)
        self._sum = torch.zeros(size, dtype=torch.int64, device=device)
        self._weight = torch.zeros(size, dtype=torch.int64, device=device)
        self._index: dict[int, tuple[Coverage, torch.Tensor]] = {}

    def add(self, values: Floats, coverage: Coverage, weight: int, scale: float) -> None:
        sent = torch.from_numpy(values).to(self._device)
        fixed = sent.double().mul(scale).round_().to(torch.int64)
        if coverage.index is not None:
            self._add(self._index_of(coverage, coverage.index), sent, fixed, weight)
        for start, target, length in coverage.runs:
            part = slice(start, start + length)
            self._add(slice(target, target + length), sent[part], fixed[part], weight)

    def _add(self, at: torch.Tensor | slice, sent: torch.Tensor, fixed: torch.Tensor, weight: int) -> None:
        if self._base is None:
            self._sum[at] += fixed
            self._weight[at] += weight
        else:
            changed = sent != self._base[at]
            self._sum[at] += fixed * changed
            self._weight[at] += weight * changed

    def _index_of(self, coverage: Coverage, index: npt.NDArray[np.int64]) -> torch.Tensor:
        if id(coverage) not in self._index:
            self._index[id(coverage)] = (coverage, torch.from_numpy(index).to(self._device))
        return self._index[id(coverage)][1]

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        weight = self._weight.clamp(min=1).to(torch.float64).mul_(unit)
        mean: npt.NDArray[np.float64] = self._sum.to(torch.float64).div_(weight).cpu().numpy()
        held: npt.NDArray[np.bool_] = (self._weight > 0).cpu().numpy()
        return mean, held


def accumulator(size: int, device: str = "auto", base: Floats | None = None) -> Accumulator:
    """Sums on ``device``: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is one), of what differs from ``base``."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        CpuAccumulator(size, base) if device == "cpu" else TorchAccumulator(size, torch.device(device), base)
    )
