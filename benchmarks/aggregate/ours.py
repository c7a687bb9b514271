"""The server's aggregator on random updates: a whole round of it, the sums alone, and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common.coded import CodedModel
from edgefl.system.memory import cores
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import decode
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.adders import Checked
from edgefl_server.aggregate.aggregator import Aggregator, accumulator, layout_of
from edgefl_server.aggregate.averaging import OverHolders
from edgefl_server.aggregate.scatter import Pieces, flatten

_ACCUMULATED = 8
"""Bytes of an entry's sum."""


class Ours:
    """``clients`` updates of ``model`` and, with each :meth:`run`, what it took to aggregate them: seconds, and bytes per
    second of the copies. ``examples`` are the weights."""

    def __init__(self, model: CodedModel, *, clients: int, threads: int, device: str) -> None:
        self.model = model
        self.threads = threads or cores()
        self.layout = layout_of(model.weights)
        self.examples = [100 + client for client in range(clients)]
        self.updates = [model.random_update(client) for client in range(clients)]
        self.update_bytes = sum(array.nbytes for array in self.updates[0].values())
        self._device = device
        self.round_s: list[float] = []
        self.seconds: list[float] = []
        self.copies: list[float] = []
        self.batches = 0
        self.aggregated()  # compiles what is not compiled yet
        self._accumulate()

    @property
    def counted_bytes(self) -> int:
        """Every byte of every update once, and the sums read and written once per batch."""
        return len(self.updates) * self.update_bytes + 2 * _ACCUMULATED * self.layout.size * self.batches

    def run(self, times: int) -> None:
        """So many aggregations, accumulations and copies, by turns."""
        for _ in range(times):
            start = time.perf_counter()
            self.aggregated()
            self.round_s.append(time.perf_counter() - start)
            self.seconds.append(self._accumulate())
            self.copies.append(self._copy.bytes_per_s())

    def aggregated(self) -> Arrays:
        """The new weights, as a round of the server makes them."""
        aggregator = self._aggregator()
        for update, examples in zip(self.updates, self.examples, strict=True):
            aggregator.add(aggregator.check(update, self.model.regions, self.model.form), examples)
        result = aggregator.result(self.model.weights)
        aggregator.released()
        return result

    def decoded(self, update: Arrays) -> npt.NDArray[np.float32]:
        """An update as float32 in the order of the layout."""
        shapes = self.layout.shapes
        return flatten(self.layout, decode(self.model.form, update, self.model.regions, shapes)).astype(
            np.float32
        )

    def difference(self, average: Path) -> float:
        """The largest between our new weights and those of ``average``, a file of Flower's."""
        theirs = np.fromfile(average, np.float32)
        if self.model.form.change:
            theirs += flatten(self.layout, self.model.weights)
        return float(np.abs(flatten(self.layout, self.aggregated()) - theirs).max())

    def _aggregator(self) -> Aggregator:
        limit = sum(self.examples)
        return Aggregator(
            self.layout, weight_limit=limit, device=self._device, threads=self.threads, sums=self._sums
        )

    @cached_property
    def _sums(self) -> Accumulator:
        """Sums that all rounds share, as on a server."""
        return accumulator(self.layout.size, self._device, self.threads)

    @cached_property
    def _copy(self) -> CpuCopy | CudaCopy:
        return CudaCopy() if self._device == "cuda" else CpuCopy(self.threads)

    @cached_property
    def _checked(self) -> list[Checked]:
        aggregator = self._aggregator()
        return [aggregator.check(update, self.model.regions, self.model.form) for update in self.updates]

    def _accumulate(self) -> float:
        """Seconds that the sums take alone, in the batches that the aggregator makes."""
        self._sums.reset()
        sums = _Timed(self._sums, self._device)
        scale = 2.0 ** self._aggregator().fraction_bits
        average = OverHolders(self.layout, cast(Accumulator, sums), scale)
        for update, examples in zip(self._checked, self.examples, strict=True):
            average.add(update, examples, examples * scale)
        average.flush()
        self.batches = sums.batches
        return sums.seconds


class _Timed:
    """Accumulator that times what it adds."""

    def __init__(self, sums: Accumulator, device: str) -> None:
        self.seconds = 0.0
        self.batches = 0
        self._sums = sums
        self._cuda = device == "cuda"

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: npt.NDArray[np.float64]) -> None:
        start = time.perf_counter()
        self._sums.add(pieces, updates, factors)
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.batches += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sums, name)


COPIED_BYTES = 512 << 20
"""Of one copy: far beyond the caches of any processor."""


class CpuCopy:
    """A copy between two arrays of ``size`` bytes, each of ``threads`` threads having its stretch of both."""

    def __init__(self, threads: int, size: int = COPIED_BYTES) -> None:
        self.source, self.target = (
            np.ones(size, np.uint8),
            np.zeros(size, np.uint8),
        )  # written to, so really there
        self.target.fill(2)
        edges = np.linspace(0, size, threads + 1).astype(np.int64).tolist()
        self._spans = [slice(first, stop) for first, stop in pairwise(edges)]

    def bytes_per_s(self) -> float:
        """Of one copy: its bytes count twice, once read and once written."""
        with ThreadPoolExecutor(len(self._spans)) as pool:
            start = time.perf_counter()
            list(pool.map(lambda span: np.copyto(self.target[span], self.source[span]), self._spans))
            return 2 * self.source.nbytes / (time.perf_counter() - start)


class CudaCopy:
    """The same on the GPU, from its memory to its memory."""

    def __init__(self, size: int = COPIED_BYTES) -> None:
        import torch

        self.source = torch.ones(size, dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def bytes_per_s(self) -> float:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        self.target.copy_(self.source)
        torch.cuda.synchronize()
        return 2 * self.source.nbytes / (time.perf_counter() - start)
