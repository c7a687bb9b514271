"""Models and random updates for the benchmarks of codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.federation_options import parse_named
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import Region, local_shape
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import CodeEncoding, FloatEncoding, Form, Section, SparseEncoding

CODECS = ("dense", "float16", "int8", "fedpaq", "fedbat", "topk")
"""Codecs that are measured by default."""

_SMALL = 1e-3
_LAYERS = 8


@dataclass(frozen=True)
class CodedModel:
    """Model whose whole update is coded: all units of ``spec``, trained by the algorithm of a codec."""

    spec: ModelSpec
    codec: str
    algorithm: Algorithm

    @classmethod
    def of(cls, spec: ModelSpec, codec: str, *, batch: int = 32) -> CodedModel:
        """Return the model for ``codec`` as on the command line (``fedpaq:bits=3``). Raises ConfigError or ModelError."""
        tables = {"algorithm": {"batch": batch}, "codec": parse_named(codec, "codec")}
        federation = parse(tables, source=f"codec {codec!r}")
        return cls(spec, codec, algorithm_of(federation, OutputSide(spec, 0)))

    @property
    def form(self) -> Form:
        """Form of the update."""
        return self.algorithm.form

    @cached_property
    def weights(self) -> Arrays:
        """Initial weights of the server."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.spec.weights.items()}

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        """Regions of the update's tensors in the global model."""
        return OutputSide(self.spec, 0).place(self.weights, 1).regions

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the update's tensors."""
        whole = {name: array.shape for name, array in self.weights.items()}
        return {name: local_shape(name, region, whole) for name, region in self.regions.items()}

    def random_update(self, seed: int) -> Arrays:
        """Return a random update with valid codes, scales and masks, and small values."""
        rng = np.random.default_rng(seed)
        if not self.form.sections:
            return {name: rng.standard_normal(shape, np.float32) for name, shape in self.shapes.items()}
        entries = {name: int(np.prod(shape)) for name, shape in self.shapes.items()}
        parts: dict[str, list[Array]] = {name: [] for name in self.form.arrays(entries)}
        for section in self.form.sections:
            for name, array in _section(section, entries, rng):
                parts[name].append(array)
        if "mask" in parts:
            parts["mask"] = [np.packbits(np.concatenate(parts["mask"]), bitorder="little")]
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def sized(parameters: int) -> ModelSpec:
    """Return a perceptron of about so many parameters: eight square layers behind a picture of 28 x 28."""
    inputs = 28 * 28
    width = int((np.sqrt(inputs**2 + 4.0 * _LAYERS * parameters) - inputs) / (2 * _LAYERS))
    return build_model("mlp", hidden=[max(1, width)] * (_LAYERS + 1))


def _section(
    section: Section, entries: Mapping[str, int], rng: np.random.Generator
) -> list[tuple[str, Array]]:
    """Return (name of the array, part of it) for one section; masks are single bits."""
    parts: list[tuple[str, Array]] = []
    if section.scales:
        parts.append(("scales", _SMALL * (1 - rng.random(section.scales, np.float32))))
    for count in (entries[name] for name in section.names):
        match section.encoding:
            case CodeEncoding(bits=bits):
                parts.append(("codes", _codes(bits, count, rng)))
            case FloatEncoding(dtype="float32"):
                parts.append(("values", _floats(count, rng)))
            case FloatEncoding(dtype=dtype):
                parts.append(("halves", _halves(_floats(count, rng), dtype)))
            case SparseEncoding() as sparse:
                nonzeros = sparse.kept(count)
                flags = np.zeros(count, np.uint8)
                flags[rng.choice(count, nonzeros, replace=False, shuffle=False)] = 1
                parts += [("values", _floats(nonzeros, rng)), ("mask", flags)]
    return parts


def _floats(count: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    return np.float32(_SMALL) * rng.standard_normal(count, np.float32)


def _codes(bits: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random bytes whose bits beyond the last code are 0."""
    codes = rng.integers(0, 256, packed_bytes(count, bits), np.uint8)
    if bits * count % 8:
        codes[-1] &= (1 << bits * count % 8) - 1
    return codes


def _halves(values: npt.NDArray[np.float32], dtype: str) -> Array:
    if dtype == "float16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
