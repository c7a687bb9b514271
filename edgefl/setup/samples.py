"""Samples of a dataset as devices read them."""

from __future__ import annotations

from edgefl.data.dataset import Dataset, OtherInput
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import ImageReader, Reader

_HALF_OF_8_BITS = 128


def data_spec(dataset: Dataset) -> DataSpec:
    """Return the shape, dtype and reader of the devices' samples."""
    return DataSpec(
        shape=dataset.shape,
        dtype=dataset.dtype,
        classes=dataset.classes,
        scale=float(dataset.scale),
        shift=float(dataset.shift),
        below=dataset.below,
        others=tuple(_input(name, other) for name, other in dataset.others.items()),
        names=dataset.names,
        reader=_reader(dataset),
    )


def _reader(dataset: Dataset) -> Reader | None:
    """The dataset's. Images need none, unless their numbers are not those of 8 bits: white is 16 in handwritten digits."""
    if dataset.reader is None and dataset.pixels and dataset.top < _HALF_OF_8_BITS:
        return ImageReader(white=dataset.top)
    return dataset.reader


def _input(name: str, other: OtherInput) -> Input:
    return Input(name=name, shape=other.test.shape[1:], dtype=str(other.test.dtype), below=other.below)
