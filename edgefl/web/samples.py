"""Slices of a federation's training samples, for browsers whose people bring no data of their own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset

SLICES, MOST_ROWS = 16, 256
_NAME = "{}.npz"


def write_samples(folder: Path, dataset: Dataset, seed: int) -> int:
    """Up to :data:`SLICES` files of equally many rows, drawn by ``seed``; the rows of each, 0 where there are no samples.

    The rows are also on devices of the run: they are for a trial, and prove nothing about a model's accuracy.
    """
    count = len(dataset.train_y)
    slices = min(SLICES, count)
    rows = min(MOST_ROWS, count // slices) if slices else 0
    drawn = np.random.default_rng([seed, 0x3EB]).permutation(count)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(slices):
        own = np.sort(drawn[number * rows : (number + 1) * rows])
        dataset.write_device(folder / _NAME.format(number), own)
    return rows


def sample_of(folder: Path, device: str) -> Path:
    """The file for a device: the same whenever it asks, as what it trains on must not change within a round."""
    files = sorted(folder.glob(_NAME.format("*")), key=lambda path: int(path.stem))
    number = int.from_bytes(hashlib.sha256(device.encode()).digest()[:4], "big")
    return files[number % len(files)]
