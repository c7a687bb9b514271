"""Small real files of each kind that a device may hold."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.tensors import Array
from edgefl_device.config import Policy
from edgefl_device.data.samples import NO_BUNDLE, ONE_CLASS, BundleParts, FittedData, LabelSpec
from edgefl_device.data.sources import load


def fitted(
    path: Path,
    spec: DataSpec,
    label: LabelSpec = ONE_CLASS,
    policy: Policy = "refuse",
    parts: BundleParts = NO_BUNDLE,
) -> FittedData:
    return load(path, policy).fitted(spec, label, parts)


def every(data: FittedData) -> Array:
    """All rows as the model reads them."""
    return data.rows(np.arange(len(data)))


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pillow() -> Any:
    """Its module Image. Imported here, so that tests that draw no pictures are collected without it."""
    from PIL import Image

    return Image


def image(path: Path, pixels: Array) -> Path:
    """``pixels`` uint8 (H, W) or (H, W, 3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow().fromarray(pixels).save(path)
    return path


def sound(path: Path, samples: Array, rate: int = 8000) -> Path:
    """``samples`` int16 (n,) or (n, channels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1 if samples.ndim == 1 else samples.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path
