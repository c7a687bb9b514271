"""Whether the wheel in a folder has what a device needs and nothing that only this repository does.

``python -m tests.rings.wheel build/wheel``
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PACKAGES = ("edgefl", "exporters", "device_runtime", "server")
WANTED = ("device_runtime/engine/executorch/native.cpp", *(f"{package}/py.typed" for package in PACKAGES))


def problems(wheel: Path) -> list[str]:
    """What is missing from a wheel, and what does not belong into it."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    missing = [f"{wheel.name} lacks {name}" for name in WANTED if name not in names]
    tops = {name.partition("/")[0] for name in names}
    strange = sorted(top for top in tops if top not in PACKAGES and not top.endswith(".dist-info"))
    return missing + [f"{wheel.name} has {top}, which is no package of ours" for top in strange]


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("edgefl-*.whl"))
    told = [text for wheel in wheels for text in problems(wheel)] if wheels else ["no wheel was built"]
    sys.exit("\n".join(told) or 0)
