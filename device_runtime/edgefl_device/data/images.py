"""PNG and JPEG files in a folder for each class, through Pillow (extra ``images``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.readers import ImageReader
from edgefl.wire.images import PictureError, library, pixels_of
from edgefl.wire.records import BadRow
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import FileEntry, Reading, ReadSamples

_MODES = {1: "L", 3: "RGB"}


def read(reading: Reading, entries: tuple[FileEntry, ...]) -> ReadSamples:
    shape, reader = reading.spec.shape, reading.reader
    assert isinstance(reader, ImageReader)
    if len(shape) != 3 or shape[0] not in _MODES:
        raise DataError(
            f"{reading.source}: images become samples of shape (1, H, W) or (3, H, W), the model takes {shape}: give arrays "
            "(.npz)",
            expected=shape,
        )
    pillow = library()
    _, height, width = shape
    mode = _MODES[shape[0]]

    def decode(path: Path) -> Array:
        try:
            pixels = pixels_of(pillow, path, mode, (width, height))
        except PictureError as error:
            raise BadRow(str(error)) from error
        channels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
        if reader.white == 255:
            return np.ascontiguousarray(channels)
        scaled: Array = (channels.astype(np.uint16) * reader.white + 127) // 255
        return scaled.astype(np.uint8)

    return reading.decoded(reading.by_folder(entries), decode)
