"""Whether the data of a device fit a bundle. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from device_runtime.config import Source
from device_runtime.data.check import DataReport, check
from device_runtime.engine.select import open_engine
from device_runtime.round.offline import MemoryBlobs
from device_runtime.round.parts import parts_of
from edgefl.api.bundle import Bundle


def check_data(data: str | Path | Source, bundle: Bundle | str | Path) -> DataReport:
    """What a device with these data would meet in a round of a bundle: what was found, and what does not fit, row by row.

    Args:
        data: what :class:`edgefl.Agent` takes: a file, a folder or a function.
        bundle: a bundle, or its file.

    Returns:
        ``fits``, ``rows`` that fit, ``inputs`` (dtype, shape and range of each as the model reads it), ``classes`` with
        their counts, ``bad_rows`` and the first 20 ``problems``, ``unread``, the arrays and files that the model does not
        read, and ``error``, why the data cannot be used at all.

    Raises:
        BundleError: if the bundle cannot be read.
        ConfigError: if a library that the data are read by is not installed.
    """
    read = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    blobs = MemoryBlobs(dict(read.contents.blobs))
    parts = parts_of(open_engine(read.format), read.manifest, blobs)
    return check(Path(data) if isinstance(data, str) else data, read.manifest, parts)
