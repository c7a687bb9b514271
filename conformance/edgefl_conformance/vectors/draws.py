"""Vectors of a device's random draws by the keys of docs/protocol.md: generators, batches, noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Philox, SeedSequence

from edgefl_device.data.samples import Batches, DataPass, noise

_SEEDS = (0, 7, 123456, 2**53 + 1, 2**62 + 1, 2**63 - 1)
_SIZES = ((21, 8), (5, 8), (1, 4), (8, 8), (100, 7), (1, 1))
_STEPS = (0, 1, 2, 9)
_KEYS = ((7, 0), (2**62 + 1, 0, 3), (7, 1 << 20, 5, 0), (0, 0), (2**63 - 1, 2))
_NOISES = ((7, 0, 0, (5,)), (7, 1, 0, (2, 3)), (7, 0, 1, (4,)), (2**62 + 1, 12, 2, ()), (0, 0, 0, (9,)))

Cases = list[dict[str, Any]]


def draw_vectors() -> dict[str, Cases]:
    """Return lists of cases by topic.

    Integers beyond 2^53 are strings, 64-bit words are 16 hexadecimal digits, and floats are the 8 hexadecimal digits of
    their float32 bits.
    """
    return {
        "generators": [_generator(key) for key in _KEYS],
        "batches": [
            _batch(seed, rows, batch, draws, stream, step)
            for seed in _SEEDS
            for rows, batch in _SIZES
            for draws in ("walk", "draw")
            for stream, step in zip((0, 1, 0, 2), _STEPS, strict=True)
        ],
        "lengths": [_lengths(seed, step) for seed in _SEEDS[:3] for step in range(4)],
        "passes": [_pass(rows, batch, step) for rows, batch in _SIZES for step in range(-(-rows // batch))],
        "noise": [_noise(*case) for case in _NOISES],
    }


def whole(number: int) -> int | str:
    """Return an integer that every JSON reader keeps exactly: a string beyond 2^53."""
    return number if abs(number) <= 2**53 else str(number)


def _generator(key: tuple[int, ...]) -> dict[str, Any]:
    words = Philox(SeedSequence(key))
    return {
        "key": [whole(number) for number in key],
        "philox_key": [f"{int(word):016x}" for word in SeedSequence(key).generate_state(2, np.uint64)],
        "words": [f"{int(word):016x}" for word in words.random_raw(9)],
    }


def _batch(seed: int, rows: int, batch: int, draws: Any, stream: int, step: int) -> dict[str, Any]:
    found = Batches(seed, rows, batch, draws).indices(stream, step)
    told = {"seed": whole(seed), "rows": rows, "batch": batch, "draws": draws, "stream": stream, "step": step}
    return {**told, "indices": found.tolist()}


def _lengths(seed: int, step: int) -> dict[str, Any]:
    edges, lengths = (4, 8), [1, 9, 3, 8, 12, 5, 2, 4, 7, 10, 6]
    buckets = np.searchsorted(edges, lengths)
    found = Batches(seed, len(lengths), 4, "length", buckets).indices(0, step)
    told = {
        "seed": whole(seed),
        "lengths": lengths,
        "edges": list(edges),
        "batch": 4,
        "stream": 0,
        "step": step,
    }
    return {**told, "indices": found.tolist()}


def _pass(rows: int, batch: int, step: int) -> dict[str, Any]:
    one = DataPass(rows, batch)
    return {
        "rows": rows,
        "batch": batch,
        "step": step,
        "indices": one.indices(step).tolist(),
        "mask": one.mask(step).tolist(),
    }


def _noise(seed: int, step: int, port: int, shape: tuple[int, ...]) -> dict[str, Any]:
    numbers = noise(seed, step, port, shape, "float32").reshape(-1)
    bits = [f"{int(word):08x}" for word in numbers.view(np.uint32)]
    return {"seed": whole(seed), "step": step, "port": port, "shape": list(shape), "bits": bits}
