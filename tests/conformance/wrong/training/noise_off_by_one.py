"""Counts the steps of its noise from 1."""

from __future__ import annotations

from device_runtime.data import samples
from edgefl.wire.tensors import Array

_noise = samples.noise


def plant() -> None:
    def later(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
        return _noise(seed, step + 1, port, shape, dtype)

    samples.noise = later
