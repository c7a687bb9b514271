"""Where packages are imported from: this clone, or the wheel that is made of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from edgefl.system.distribution import PACKAGES, folders

ROOT = Path(__file__).resolve().parents[1]


def clone() -> dict[str, str]:
    """The environment of a process that imports the packages from this clone."""
    return _environment(*dict.fromkeys(folder.parent for folder in folders(*PACKAGES)))


def wheel(folder: Path) -> dict[str, str]:
    """The environment of a process that imports them as a wheel installs them, in ``folder``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source, site = folder / "source", folder / "site-packages"
    for name in listed.split("\0"):
        if (ROOT / name).is_file() and name.split("/")[0] not in ("tests", "agents", "docs"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, capture_output=True, text=True, check=True)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    return _environment(site)


def _environment(*ways: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ways))}
