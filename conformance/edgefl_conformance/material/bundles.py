"""The kit's bundles, the initial weights of their rounds, and the data of its devices.

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
from edgefl.wire.bundle.archive import BundleArchive, read_bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array, Arrays

FOLDER = Path(__file__).parents[1] / "data"
FORMATS = ("onnx", "executorch")
SCALE, SHIFT = 1 / 256, -0.5
"""Conversion of the samples, which are bytes in the devices' files, to floats."""
ROWS = 21
"""Rows of a device's data: no multiple of the batches of 8."""


@dataclass(frozen=True)
class Material:
    """A bundle, and the initial tensors of a round by unit."""

    name: str
    bundle: BundleArchive
    units: dict[str, Arrays]

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle."""
        return self.bundle.manifest

    @property
    def weights(self) -> Arrays:
        """All initial tensors by global name."""
        return {key: array for part in self.units.values() for key, array in part.items()}

    def with_steps(self, steps: int) -> Material:
        """Return the material with so many steps in its last phase; its graphs do not depend on the number."""
        *before, last = self.manifest.phases
        return self.changed(phases=(*before, msgspec.structs.replace(last, steps=steps)))

    def changed(self, **fields: Any) -> Material:
        """Return the material with other fields of its manifest."""
        return replace(
            self, bundle=BundleArchive(msgspec.structs.replace(self.manifest, **fields), self.bundle.blobs)
        )

    def with_units(self, units: dict[str, Arrays]) -> Material:
        """Return the material with other initial weights."""
        return replace(self, units=units)


@cache
def material(name: str, format: str) -> Material:
    """Load the bundle ``name`` in ``format``. Raises BundleError if the package has none."""
    bundle = read_bundle(FOLDER / format / f"{name}.efl")
    return Material(name, bundle, _units(bundle.manifest))


def names() -> tuple[str, ...]:
    """Return the names of all bundles."""
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
    """Return the packed mask ``label`` with ``count`` bits set.

    Each entry has a number of two bytes of SHAKE-128 of the name. The entries with the smallest numbers are set; of equal
    ones the first.
    """
    entries = MASKS[label]
    numbers = np.frombuffer(hashlib.shake_128(label.encode()).digest(2 * entries), "<u2")
    held = np.zeros(entries, np.bool_)
    held[np.argsort(numbers, kind="stable")[:count]] = True
    return bits.pack(held)


def drawn(label: str, shape: tuple[int, ...]) -> Array:
    """Return float32 numbers for the tensor ``label``, uniform in [-0.25, 0.25).

    Each two bytes of SHAKE-128 of its name are a little-endian number n, and the value is n / 2^17 - 0.25. Values of the
    server's second moments, ``v/...``, are larger by 0.25, because they cannot be negative.
    """
    count = int(np.prod(shape, dtype=np.int64))
    stream = hashlib.shake_128(label.encode()).digest(2 * count)
    values = np.frombuffer(stream, "<u2").astype(np.float32) / np.float32(1 << 17) - np.float32(0.25)
    return (values + np.float32(0.25 * label.startswith("v/"))).reshape(shape)


def samples(rows: int = ROWS, shape: tuple[int, ...] = (1, 4, 4), classes: int = 3) -> tuple[Array, Array]:
    """Return a device's data.

    Returns:
        x: uint8 (rows, *shape), the bytes of SHAKE-128 of ``samples``.
        y: int64 (rows,), the bytes of SHAKE-128 of ``labels`` modulo the number of classes.
    """
    count = rows * int(np.prod(shape))
    x = np.frombuffer(hashlib.shake_128(b"samples").digest(count), np.uint8).reshape(rows, *shape)
    y = np.frombuffer(hashlib.shake_128(b"labels").digest(rows), np.uint8).astype(np.int64) % classes
    return x, y


def unit_bytes(part: Arrays) -> bytes:
    """Return the published bytes of a unit: safetensors, with masks as gaps if these are smaller."""
    return tensors.dump(part, {key: MASKS[key] for key in part.keys() & MASKS.keys()})
