"""Vectors of the rule that divides local rows, from docs/protocol.md, Held-out rows, alone."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.tensors import Array, Arrays

FILE = "held_out.json"


@dataclass(frozen=True)
class HeldOutRows:
    """Local arrays as they are stored, and the numbers of the rows that are held out. Labels are the rows' numbers."""

    seed: int
    share: float
    spec: DataSpec
    x: Array
    others: Arrays = field(default_factory=dict)

    def held_out(self) -> list[int]:
        x = self.x.astype(self.spec.dtype)
        if self.x.dtype != x.dtype and x.dtype.kind == "f":
            x = x * x.dtype.type(self.spec.scale) + x.dtype.type(self.spec.shift)
        inputs = [x, *(self.others[each.name].astype(each.dtype) for each in self.spec.others)]
        return [
            row for row in range(len(x)) if is_held_out([each[row] for each in inputs], self.share, self.seed)
        ]


def is_held_out(inputs: Sequence[Array], share: float, seed: int) -> bool:
    """Return whether a row is held out whose inputs graphs read as ``inputs``."""
    content = b"".join(np.asarray(each, each.dtype.newbyteorder("<")).tobytes() for each in inputs)
    digest = hashlib.sha256(struct.pack("<Q", seed) + content).digest()
    return bool(struct.unpack("<Q", digest[:8])[0] < int(share * 2**64))


def cases() -> tuple[HeldOutRows, ...]:
    """Return whole numbers that are scaled, floats as they are, and tokens with further inputs."""
    rng = np.random.default_rng(57)
    floats = rng.standard_normal((30, 5)).astype(np.float32)
    floats[3] = -0.0
    tokens = rng.integers(0, 100, (60, 4), np.int32)
    others = {"age": rng.integers(18, 99, 60, np.int16), "mask": rng.integers(0, 2, (60, 2), np.uint8)}
    named = (Input(name="mask", shape=(2,), dtype="int64"), Input(name="age", shape=(), dtype="float32"))
    return (
        HeldOutRows(
            (1 << 62) + 5,
            0.3,
            DataSpec(shape=(2, 3), dtype="float32", classes=300, scale=1 / 255, shift=-0.5),
            rng.integers(0, 256, (300, 2, 3), np.uint8),
        ),
        HeldOutRows(0, 0.5, DataSpec(shape=(5,), dtype="float32", classes=30), floats),
        HeldOutRows(
            (1 << 63) - 1,
            0.1,
            DataSpec(shape=(4,), dtype="int64", classes=60, below=100, others=named),
            tokens,
            others,
        ),
    )


def written() -> bytes:
    """Return the file's content; bytes as hexadecimal digits, the seed as text, because many readers have doubles only."""
    rows = [
        {
            "seed": str(case.seed),
            "share": case.share,
            "data": msgspec.to_builtins(case.spec),
            "arrays": {name: _array(array) for name, array in {"x": case.x, **case.others}.items()},
            "held_out": case.held_out(),
        }
        for case in cases()
    ]
    return ("[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n").encode()


def _array(array: Array) -> dict[str, Any]:
    little = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": array.shape, "bytes": little.tobytes().hex()}
