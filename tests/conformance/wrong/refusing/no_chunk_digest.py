"""Takes every chunk and every blob as it comes."""

from __future__ import annotations

from edgefl.wire.blobs import BlobRef
from edgefl_device.link import fetch


def plant() -> None:
    BlobRef.accepts = lambda self, index, data: True  # type: ignore[method-assign]
    fetch.verified = lambda ref, data: data
