"""A distribution to install that needs no build, no requirements and no network."""

from __future__ import annotations

import zipfile
from pathlib import Path


def tiny_wheel(folder: Path) -> Path:
    """A wheel of the module ``neighbour``, written by hand."""
    wheel = folder / "neighbour-1.0-py3-none-any.whl"
    about = "neighbour-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("neighbour.py", "HERE = True\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel
