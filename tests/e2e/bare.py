"""An environment with what a device's distribution declares, and nothing else: no torch, no server."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]


def bare_environment(folder: Path) -> Path:
    """Its ``python``. The packages are ours, linked: a declared dependency that is missing is missing there, too.

    ExecuTorch lies beside them as ``pip install --no-deps executorch`` leaves it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in ("edgefl", "device_runtime/edgefl_device"):
        (site / Path(name).name).symlink_to(REPOSITORY / name)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"]
    for package in _needed(declared):
        _link(package, site)
    _link(distribution("executorch"), site)
    return folder / "bin" / "python"


def _needed(declared: list[str]) -> Iterator[Distribution]:
    """The distributions behind ``declared`` and behind what these declare."""
    waiting, known = [(text, "") for text in declared], set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        package = distribution(requirement.name)
        for chosen in ("", *requirement.extras):
            if (package.name, chosen) not in known:
                known.add((package.name, chosen))
                waiting += [(each, chosen) for each in package.requires or ()]
        yield package


def _link(package: Distribution, site: Path) -> None:
    for name in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
        source, target = Path(str(package.locate_file(name))), site / name
        if source.exists() and not target.exists():
            target.symlink_to(source)
