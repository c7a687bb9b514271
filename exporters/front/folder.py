"""Bundles on disk: the file of each, and beside it the digest of what it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgefl.system.files import write_whole
from edgefl.wire.bundle import archive
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.errors import BundleError


def bundle_name(tier: str, exchange: str = "", format: str = "onnx") -> str:
    """File of a tier's bundle for an exchange, in ONNX unless its name says otherwise."""
    words = (tier, exchange, "" if format == "onnx" else format, "efl")
    return ".".join(word for word in words if word)


def stored_bundle(path: Path, digest: str, make: Callable[[], Bundle]) -> Bundle:
    """The bundle at ``path`` if it is whole and was made from what has this digest, else a new one, written there."""
    mark = path.with_name(f"{path.name}.digest")
    if mark.exists() and mark.read_text() == digest:
        try:
            return archive.read_bundle(path)
        except BundleError:
            pass  # damaged on disk: made again below
    mark.unlink(missing_ok=True)
    bundle = make()
    archive.write_bundle(bundle, path)
    write_whole(mark, digest.encode())
    return bundle
