"""Counts the steps of its noise from 1."""

from __future__ import annotations

from edgefl.wire.tensors import Array
from edgefl_device.data import samples

_noise = samples.noise


def plant() -> None:
    def later(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
        return _noise(seed, step + 1, port, shape, dtype)

    samples.noise = later
