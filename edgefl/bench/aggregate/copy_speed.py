"""How fast memory is: the largest rate of a plain copy, which aggregation is measured against."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

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
