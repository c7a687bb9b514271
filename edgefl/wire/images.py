"""Decoder of PNG and JPEG files by Pillow (extra ``images``), used on devices and for the server's data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.errors import ConfigError
from edgefl.wire.tensors import Array

SUFFIXES = (".png", ".jpg", ".jpeg")
UNREAD = (".gif", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jfif", ".ppm", ".svg")
"""Suffixes of image files that are refused, so that none is skipped silently."""
DRAFT = 2
"""Least factor between the size at which a large JPEG is decoded and the requested size."""
_MOST_PIXELS = 1 << 26
"""Most pixels of a decoded image, 192 MiB in RGB, so that none takes the memory of the training."""


class ImageError(Exception):
    """An image file that cannot be used: not PNG or JPEG, unreadable, too large, or more than 8 bits per channel."""


def read_pixels(pillow: Any, path: Path, mode: str, size: tuple[int, int]) -> Array:
    """Return the pixels of an image file, rotated by its EXIF orientation and stretched to ``size``.

    Args:
        pillow: Package Pillow (:func:`import_pillow`).
        path: PNG or JPEG file.
        mode: ``L`` (grey) or ``RGB``.
        size: Width and height of the result in pixels.

    Returns:
        uint8 (H, W) for mode ``L``, (H, W, 3) for ``RGB``.

    Raises:
        ImageError: The file cannot be used.
    """
    if path.suffix.lower() in UNREAD:
        raise ImageError(f"is no PNG or JPEG but {path.suffix}: convert it")
    try:
        with pillow.Image.open(path) as image:
            longest = max(size)  # an image that lies on its side has width and height swapped here
            image.draft(mode, (DRAFT * longest, DRAFT * longest))
            if image.width * image.height > _MOST_PIXELS:
                raise ImageError(
                    f"it has {image.width} x {image.height} pixels, more than {_MOST_PIXELS:,}: make it smaller"
                )
            upright = pillow.ImageOps.exif_transpose(image)
            if upright.mode.startswith("I") or upright.mode == "F":
                raise ImageError(f"it has pixels of more than 8 bits ({upright.mode})")
            return np.asarray(_resize(pillow, upright.convert(mode), size), np.uint8)
    except ImageError:
        raise
    except Exception as error:  # Pillow and its codecs raise a dozen unrelated types for damaged files
        raise ImageError(f"is no image that can be read: {error}") from error


def _resize(pillow: Any, image: Any, size: tuple[int, int]) -> Any:
    """Return a Pillow image resized to ``size`` (width, height) bilinearly, columns before rows.

    Pillow 13 would choose the order by size, older releases do not.
    """
    width, height = size
    bilinear = pillow.Image.Resampling.BILINEAR
    return image.resize((width, image.height), bilinear).resize((width, height), bilinear)


def import_pillow() -> Any:
    """Import and return the package Pillow.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL
        from PIL import Image, ImageOps  # noqa: F401
    except ImportError as error:
        raise _missing_error() from error
    return PIL


def check_library() -> None:
    """Check that Pillow is installed, without importing it: a waiting device should not spend memory on it.

    Raises:
        ConfigError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise _missing_error()


def _missing_error() -> ConfigError:
    """Return the error for a missing Pillow."""
    return ConfigError(
        "images are read by Pillow, which is not installed: pip install 'edgefl-tiers[images]'",
        package="pillow",
    )
