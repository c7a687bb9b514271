"""PNG and JPEG files in a folder for each class, through Pillow (extra ``images``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from device_runtime.data.problems import BadRow
from device_runtime.data.reading import Entry, Reading, Samples
from edgefl.wire.bundle.readers import Image
from edgefl.wire.errors import ConfigError, DataError
from edgefl.wire.tensors import Array

_MODES = {1: "L", 3: "RGB"}
_LARGER = 2
"""A large JPEG is decoded at a smaller size right away, which is at least this many times what is asked for."""
_MOST_PIXELS = 1 << 26
"""Of an image as it is decoded, so that none takes the memory of the training: 192 MiB in RGB."""


def read(reading: Reading, entries: tuple[Entry, ...]) -> Samples:
    shape, reader = reading.spec.shape, reading.reader
    assert isinstance(reader, Image)
    if len(shape) != 3 or shape[0] not in _MODES:
        raise DataError(
            f"{reading.source}: images become samples of shape (1, H, W) or (3, H, W), the model takes {shape}: give arrays "
            "(.npz)",
            expected=shape,
        )
    pillow = _library()
    _, height, width = shape
    mode = _MODES[shape[0]]

    def decode(path: Path) -> Array:
        try:
            pixels = _pixels(pillow, path, mode, (width, height))
        except BadRow:
            raise
        except Exception as error:  # Pillow and its codecs raise a dozen unrelated types for damaged files
            raise BadRow(f"is no image that can be read: {error}") from error
        channels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
        if reader.white == 255:
            return np.ascontiguousarray(channels)
        scaled: Array = (channels.astype(np.uint16) * reader.white + 127) // 255
        return scaled.astype(np.uint8)

    return reading.decoded(reading.by_folder(entries), decode)


def _pixels(pillow: Any, path: Path, mode: str, size: tuple[int, int]) -> Array:
    """uint8 (H, W) or (H, W, 3)."""
    with pillow.Image.open(path) as image:
        longest = max(size)  # an image that lies on its side has width and height swapped here
        image.draft(mode, (_LARGER * longest, _LARGER * longest))
        if image.width * image.height > _MOST_PIXELS:
            raise BadRow(
                f"it has {image.width} x {image.height} pixels, more than {_MOST_PIXELS:,}: make it smaller"
            )
        upright = pillow.ImageOps.exif_transpose(image)
        if upright.mode.startswith("I") or upright.mode == "F":
            raise BadRow(f"it has pixels of more than 8 bits ({upright.mode})")
        converted = upright.convert(mode)
        return np.asarray(converted.resize(size, pillow.Image.Resampling.BILINEAR), np.uint8)


def _library() -> Any:
    try:
        import PIL
        from PIL import Image, ImageOps  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "images are read by Pillow, which is not installed: pip install 'edgefl-tiers[images]'"
        ) from error
    return PIL
