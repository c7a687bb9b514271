"""Preprocessing of samples as a part of a model: pixels, sounds and columns of tables become its first input."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.log_mel import LogMel
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageReader, SeriesReader, SoundReader, TableReader


class Preprocessing(Protocol):
    """Layer that makes the first input of raw samples.

    Attributes:
        example: one raw sample.
        dynamic: axes of a raw sample that may have any size.
    """

    @property
    def example(self) -> Tensor: ...

    @property
    def dynamic(self) -> tuple[int, ...]: ...

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the first input (n, *sample) of raw samples (n, ...)."""

    def raw(self, x: Tensor) -> Tensor:
        """Return raw samples from which the first input ``x`` is made again, or others where it has no inverse."""

    @property
    def invertible(self) -> bool:
        """Return True if :meth:`raw` inverts the layer, so that the file's accuracy can be measured."""


class Pixels(nn.Module):
    """Pixels (n, H, W, C), uint8, of any size as the floats (n, C, height, width) that a model reads.

    They are stretched as Pillow does with an antialiased bilinear filter, rounded, and scaled.
    """

    invertible = True

    def __init__(self, data: DataSpec, *, resize: bool) -> None:
        super().__init__()
        channels, self.height, self.width = data.shape
        self.scale, self.shift, self.resize = data.scale, data.shift, resize
        self.white = data.reader.white if isinstance(data.reader, ImageReader) else 255
        side = (2 * self.height + 1, 2 * self.width + 3) if resize else (self.height, self.width)
        self.example = torch.zeros((*side, channels), dtype=torch.uint8)
        self.dynamic: tuple[int, ...] = (0, 1) if resize else ()

    def forward(self, raw: Tensor) -> Tensor:
        """Return the first input."""
        pixels = raw.permute(0, 3, 1, 2).float()
        if self.resize:
            size = (self.height, self.width)
            pixels = (
                nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True).round().clamp(0, 255)
            )
        if self.white != 255:
            pixels = (pixels * self.white + 127).div(255).floor()
        return pixels * self.scale + self.shift

    def raw(self, x: Tensor) -> Tensor:
        """Return the pixels of ``x`` in its own size."""
        pixels = ((x - self.shift) / self.scale).round()
        if self.white != 255:
            pixels = (pixels * 255 / self.white).floor()
        return pixels.clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8)


class Waves(nn.Module):
    """Sounds (n, length) in [-1, 1] as log-mel features."""

    dynamic: tuple[int, ...] = ()
    invertible = False

    def __init__(self, reader: SoundReader) -> None:
        super().__init__()
        self.features = LogMel.of(reader)
        self.example = torch.zeros(reader.length)

    def forward(self, raw: Tensor) -> Tensor:
        """Return the features."""
        made: Tensor = self.features(raw)
        return made

    def raw(self, x: Tensor) -> Tensor:
        """Return noise of as many sounds: features have no inverse."""
        generator = torch.Generator().manual_seed(0)
        return torch.rand((len(x), *self.example.shape), generator=generator) * 2 - 1


class Columns(nn.Module):
    """Columns of a table or of series with mean and deviation taken out."""

    dynamic: tuple[int, ...] = ()
    invertible = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, data: DataSpec, reader: TableReader | SeriesReader) -> None:
        super().__init__()
        count = len(reader.columns)
        across = isinstance(reader, SeriesReader) and not reader.channels_last
        shape = (count, 1) if across else (count,)
        for name, numbers in (
            ("mean", reader.mean or [0.0] * count),
            ("deviation", reader.deviation or [1.0] * count),
        ):
            self.register_buffer(name, torch.tensor(numbers).reshape(shape), persistent=False)
        self.example = torch.zeros(data.shape)

    def forward(self, raw: Tensor) -> Tensor:
        """Return the first input."""
        return (raw - self.mean) / self.deviation

    def raw(self, x: Tensor) -> Tensor:
        """Return the columns as they are in a file."""
        return x * self.deviation + self.mean


def preprocessing_of(data: DataSpec, *, pixels: bool, resize: bool) -> Preprocessing | None:
    """Return the layer that makes samples of ``data``, or None if tensor operators cannot make them.

    Args:
        data: the samples, and how files become samples.
        pixels: whether samples are images of whole numbers.
        resize: whether the operators of the format can resize images of any size.
    """
    reader = data.reader
    if pixels and (reader is None or isinstance(reader, ImageReader)):
        return Pixels(data, resize=resize)
    if isinstance(reader, SoundReader) and reader.mels:
        return Waves(reader)
    if (
        isinstance(reader, TableReader | SeriesReader)
        and (reader.mean or reader.deviation)
        and not data.below
    ):
        return Columns(data, reader)
    return None


def raw_spec(layer: Preprocessing) -> TensorSpec:
    """Return one raw sample as a spec."""
    return TensorSpec.of(layer.example)
