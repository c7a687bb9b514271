"""Runs the Triton kernel in its interpreter and prints, as JSON, which cases gave the bits of a plain sum.

A process of its own: Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from benchmarks.sign_kernel import measure_signs
from edgefl.wire.update.form import CodeEncoding, Form, Section
from edgefl_server.aggregate.accumulator import CpuAccumulator
from edgefl_server.aggregate.adders import CheckedArrays
from edgefl_server.aggregate.cuda import TorchAccumulator
from edgefl_server.aggregate.scatter import BLOCK, Integers, compile_pieces
from edgefl_server.aggregate.triton_kernels import Tuning, add_signs
from tests.server.aggregate.test_kernels import LAYOUT, REGIONS, SIZE, drawn

BOUNDS = np.iinfo(np.int64)
SMALL = Tuning(words=16)
CLIENTS = (1, 2, 3, 4, 5, 8, 13, 64)


def plain(bits: Integers, values: Integers, blocks: Integers, index: Integers, sums: Integers) -> Integers:
    """Entry by entry: ``bits`` is 0 or 1 [clients, bits]."""
    sums = sums.copy()  # an array of one: numpy warns of scalars that wrap
    for first, length, _, row, target in blocks.tolist():
        for i in range(length):
            place = target + i if target < len(sums) else index[target - len(sums) + i]
            sums[place : place + 1] += values[np.arange(len(bits)), row, bits[:, first + i]].sum()
    return sums


def agrees(seed: int, clients: int, tuning: Tuning, low: int = -(1 << 40), high: int = 1 << 40) -> bool:
    """Blocks of any length at any bit, some of them scattered, onto sums that are not 0."""
    rng = np.random.default_rng(seed)
    lengths = [1, 64, 33, int(rng.integers(300, 900))]
    size, gaps = 4000, rng.integers(0, 40, len(lengths))
    firsts = np.cumsum(lengths) - lengths + np.cumsum(gaps)
    places = rng.permutation(size // 2)[: sum(lengths[::2])] + size // 2
    blocks, listed, placed = [], 0, 0
    for number, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        scattered = number % 2 == 0
        blocks.append((first, length, 0, rng.integers(3), size + listed if scattered else placed + 5))
        listed, placed = (listed + length, placed) if scattered else (listed, placed + length + 3)
    width = -(-int(firsts[-1] + lengths[-1]) // 32) * 4 + 4
    codes = rng.integers(0, 256, (clients, width), dtype=np.uint8)
    values = rng.integers(low, high, (clients, 3, 2), dtype=np.int64, endpoint=True)
    sums = rng.integers(low, high, size, dtype=np.int64, endpoint=True)
    expected = plain(
        np.unpackbits(codes, axis=1, bitorder="little").astype(np.int64),
        values,
        np.array(blocks),
        places,
        sums,
    )
    found = torch.from_numpy(sums)
    on = [torch.from_numpy(array) for array in (codes, np.array(blocks), places)]
    add_signs(on[0], values, on[1], on[2], found, tuning)
    return np.array_equal(found.numpy(), expected)


def full_block_agrees() -> bool:
    """A block of the longest length, cut among programs, with words to spare."""
    rng = np.random.default_rng(1)
    codes, values = rng.integers(0, 256, (5, BLOCK // 8 + 4), dtype=np.uint8), rng.integers(-9, 9, (5, 1, 2))
    bits = np.unpackbits(codes, axis=1, bitorder="little")[:, 3 : 3 + BLOCK]
    expected = np.where(bits, values[:, 0, 1:], values[:, 0, :1]).sum(0)
    blocks, index = torch.tensor([[3, BLOCK, 0, 0, 0]]), torch.zeros(1, dtype=torch.int64)
    for tuning in (Tuning(words=32), Tuning(words=128), Tuning(words=256)):
        sums = torch.zeros(BLOCK, dtype=torch.int64)
        add_signs(torch.from_numpy(codes), values, blocks, index, sums, tuning)
        if not np.array_equal(sums.numpy(), expected):
            return False
    return True


def accumulator_agrees(kind: str, scale: float | None) -> bool:
    """The whole way from checked updates, beside numba's."""
    rng, regions = np.random.default_rng(7), REGIONS[kind]
    groups = {name: number for number, name in enumerate(sorted(LAYOUT.shapes))}
    form = Form(
        "signs", sections=(Section(tuple(sorted(regions)), CodeEncoding(1, (-1.0, 1.0), scale), groups),)
    )
    made = compile_pieces(LAYOUT, regions, form)
    updates = [
        CheckedArrays(made, tuple(arrays[name] for name in made.sources))
        for arrays in (drawn(rng, form, regions) for _ in range(5))
    ]
    factors = rng.integers(1, 1000, 5) * 2.0**20
    engines = CpuAccumulator(SIZE), TorchAccumulator(SIZE, torch.device("cpu"), triton=True)
    for engine in engines:
        engine.add(made, updates, factors)
        engine.add(made, updates[:1], factors[:1])
    return np.array_equal(engines[0].sums(), engines[1].sums()) and bool(engines[0].sums().any())


def measured() -> bool:
    found = measure_signs(4_501, 3, repeat=1, device="cpu", copied=1 << 16)
    return found["bytes"] == 3 * 563 + 16 * 4_501 and found["copy_fraction"] > 0


def every() -> dict[str, bool]:
    """Any number of clients, the extremes, and the whole engine around the kernel."""
    found = {
        "13 clients": agrees(13, 13, SMALL),
        "extremes of int64": agrees(11, 7, SMALL, int(BOUNDS.min), int(BOUNDS.max)),
    }
    found |= {f"{clients} clients": agrees(clients, clients, SMALL) for clients in CLIENTS}
    found["a full block"] = full_block_agrees()
    for kind in ("whole", "slices", "entries"):
        found[f"accumulator, {kind}"] = accumulator_agrees(kind, None)
    found["accumulator, known scale"] = accumulator_agrees("narrow", 0.37)
    found["measurement"] = measured()
    return found


if __name__ == "__main__":
    print(json.dumps(every()))
