"""The kit's bundles as they lie in the package, the weights that their rounds begin with, and the data of its devices.

Weights and data are functions of names and numbers, so every implementation has the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.wire import bits, tensors
from edgefl.wire.bundle.archive import Bundle, read_bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array, Arrays

FOLDER = Path(__file__).parents[1] / "data"
FORMATS = ("onnx", "executorch")
SCALE, SHIFT = 1 / 256, -0.5
"""Of the bundles' samples, which lie as bytes in the devices' files."""
ROWS = 21
"""Of a device's data: no multiple of the batches of 8."""


@dataclass(frozen=True)
class Material:
    """A bundle, and by unit the tensors that a round of it begins with."""

    name: str
    bundle: Bundle
    units: dict[str, Arrays]

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def weights(self) -> Arrays:
        """All of them, by global name."""
        return {key: array for part in self.units.values() for key, array in part.items()}

    def with_steps(self, steps: int) -> Material:
        """The same with so many steps in its last phase; the graphs do not know how many there are."""
        *before, last = self.manifest.phases
        return self.changed(phases=(*before, msgspec.structs.replace(last, steps=steps)))

    def changed(self, **fields: Any) -> Material:
        """The same with other fields of its manifest."""
        return replace(
            self, bundle=Bundle(msgspec.structs.replace(self.manifest, **fields), self.bundle.blobs)
        )

    def with_units(self, units: dict[str, Arrays]) -> Material:
        """The same, begun with other weights."""
        return replace(self, units=units)


@cache
def material(name: str, format: str) -> Material:
    """The bundle ``name`` in ``format``. BundleError if the package holds none."""
    bundle = read_bundle(FOLDER / format / f"{name}.efl")
    return Material(name, bundle, _units(bundle.manifest))


def names() -> tuple[str, ...]:
    """Of all bundles."""
    return tuple(sorted(path.stem for path in (FOLDER / FORMATS[0]).glob("*.efl")))


MASKS = {"submodel.mask": 335}
"""Entries of the tensors that are packed masks."""


def _units(manifest: Manifest) -> dict[str, Arrays]:
    ports = {port.label: port for graph in manifest.of_round for port in graph.inputs_of("weights")}
    named = (*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix)
    whole = {
        label: mask(label, ports["submodel.values"].shape[0]) if label in MASKS else drawn(label, port.shape)
        for label, port in sorted(ports.items())
    }
    units = {unit: {label: a for label, a in whole.items() if label.startswith(f"{unit}.")} for unit in named}
    return units if any(units.values()) else {named[0]: whole}  # a payload's tensors are not named after it


def mask(label: str, count: int) -> Array:
    """The packed mask ``label`` with ``count`` bits set: each entry has a number, of two bytes of SHAKE-128 of the name, and
    those with the smallest are set, of equal ones the first."""
    entries = MASKS[label]
    numbers = np.frombuffer(hashlib.shake_128(label.encode()).digest(2 * entries), "<u2")
    held = np.zeros(entries, np.bool_)
    held[np.argsort(numbers, kind="stable")[:count]] = True
    return bits.pack(held)


def drawn(label: str, shape: tuple[int, ...]) -> Array:
    """float32 numbers for the tensor ``label``, uniform in [-0.25, 0.25): of the bytes of SHAKE-128 of its name, each two
    are a little-endian number n, which stands for n / 2^17 - 0.25. Of the server's second moments, ``v/...``, it is 0.25
    more: they are not below 0."""
    count = int(np.prod(shape, dtype=np.int64))
    stream = hashlib.shake_128(label.encode()).digest(2 * count)
    values = np.frombuffer(stream, "<u2").astype(np.float32) / np.float32(1 << 17) - np.float32(0.25)
    return (values + np.float32(0.25 * label.startswith("v/"))).reshape(shape)


def samples(rows: int = ROWS, shape: tuple[int, ...] = (1, 4, 4), classes: int = 3) -> tuple[Array, Array]:
    """A device's data: x uint8 (rows, *shape), the bytes of SHAKE-128 of ``samples``, and y int64 (rows,), those of
    ``labels`` modulo the number of classes."""
    count = rows * int(np.prod(shape))
    x = np.frombuffer(hashlib.shake_128(b"samples").digest(count), np.uint8).reshape(rows, *shape)
    y = np.frombuffer(hashlib.shake_128(b"labels").digest(rows), np.uint8).astype(np.int64) % classes
    return x, y


def unit_bytes(part: Arrays) -> bytes:
    """What is published of a unit: safetensors, masks as gaps where they are smaller."""
    return tensors.dump(part, {key: MASKS[key] for key in part.keys() & MASKS.keys()})
