"""Exact sums of fixed-point integers: numpy on the CPU, torch on CUDA; both give the same bits.

On the CPU numpy with reused scratch is the faster engine: torch's thread pool costs more than it gives when the
processor is shared, and fresh 2 MB temporaries cost page faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgefl.submodels.submodel import Region, shape_of, slices
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
    runs: list[tuple[int, int, int]] = []
    size = 0
    for name in sorted(regions):
        whole, region = layout.shapes[name], regions[name]
        shapes[name] = shape_of(region, whole)
        for target, length in _stretches(layout.offsets[name], whole, region):
            last = runs[-1] if runs else (0, 0, 0)
            if last[1] + last[2] == target and last[2]:
                runs[-1] = (last[0], last[1], last[2] + length)
            else:
                runs.append((size, target, length))
            size += length
    if len(runs) <= _MOST_RUNS:
        return Coverage(shapes, size, tuple(runs), None)
    index = np.concatenate([np.arange(target, target + length) for _, target, length in runs])
    return Coverage(shapes, size, (), index)


def _stretches(offset: int, whole: tuple[int, ...], region: Region) -> list[tuple[int, int]]:
    """(start in the model, length) of the contiguous parts of a tensor's region, in the region's own order."""
    count = math.prod(whole)
    if region is None:
        return [(offset, count)] if count else []
    positions = np.arange(offset, offset + count).reshape(whole)[slices(region)].ravel()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *breaks.tolist(), positions.size]
    return [(int(positions[start]), stop - start) for start, stop in pairwise(edges) if stop > start]


class Accumulator(Protocol):
    """Integer sums and weights over a flat model of ``size`` entries."""

    def add(self, values: Floats, coverage: Coverage, weight: int, scale: float) -> None:
        """Add ``round(values * scale)`` and ``weight`` to the covered entries."""

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """(sum / (weight * unit), weight > 0); the mean is undefined where the weight is 0."""


class CpuAccumulator:
    """The sums in numpy. Scratch is as large as the model, whatever the number of updates."""

    def __init__(self, size: int) -> None:
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
            self._sum[coverage.index] += fixed  # a region names no entry twice
            self._weight[coverage.index] += weight
        for start, target, length in coverage.runs:
            self._sum[target : target + length] += fixed[start : start + length]
            self._weight[target : target + length] += weight

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        held = self._weight > 0
        weight = np.where(held, self._weight, 1)
        return self._sum.astype(np.float64) / (weight.astype(np.float64) * unit), held


class TorchAccumulator:
    """The sums on a torch device. float64 and int64 arithmetic follow IEEE 754 there too: same bits as numpy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._sum = torch.zeros(size, dtype=torch.int64, device=device)
        self._weight = torch.zeros(size, dtype=torch.int64, device=device)
        self._index: dict[int, tuple[Coverage, torch.Tensor]] = {}

    def add(self, values: Floats, coverage: Coverage, weight: int, scale: float) -> None:
        fixed = (
            torch.from_numpy(values).to(self._device).to(torch.float64).mul_(scale).round_().to(torch.int64)
        )
        if coverage.index is not None:
            index = self._index_of(coverage, coverage.index)
            self._sum[index] += fixed
            self._weight[index] += weight
        for start, target, length in coverage.runs:
            self._sum[target : target + length] += fixed[start : start + length]
            self._weight[target : target + length] += weight

    def _index_of(self, coverage: Coverage, index: npt.NDArray[np.int64]) -> torch.Tensor:
        if id(coverage) not in self._index:
            self._index[id(coverage)] = (coverage, torch.from_numpy(index).to(self._device))
        return self._index[id(coverage)][1]

    def mean(self, unit: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        weight = self._weight.clamp(min=1).to(torch.float64).mul_(unit)
        mean: npt.NDArray[np.float64] = self._sum.to(torch.float64).div_(weight).cpu().numpy()
        held: npt.NDArray[np.bool_] = (self._weight > 0).cpu().numpy()
        return mean, held


def accumulator(size: int, device: str = "auto") -> Accumulator:
    """Sums on ``device``: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is one)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return CpuAccumulator(size) if device == "cpu" else TorchAccumulator(size, torch.device(device))
