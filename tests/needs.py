"""Programs that some tests need beside Python. Without one the test is skipped, and the reason names the package."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

PACKAGES = {
    "c++": "g++",
    "chromium": "chromium",
    "initdb": "postgresql",
    "dpkg-deb": "dpkg",
    "javac": "openjdk-17-jdk-headless",
    "lintian": "lintian",
    "mmdebstrap": "mmdebstrap",
    "mosquitto": "mosquitto",
    "mosquitto_passwd": "mosquitto",
    "node": "nodejs npm",
    "npm": "nodejs npm",
    "strace": "strace",
    "strip": "binutils",
    "systemd-analyze": "systemd",
}
"""Debian's package for each program."""
_ENVIRONMENT, _SERVERS = str(Path(sys.executable).parent), "/usr/sbin:/usr/local/sbin"
"""Folders outside a user's PATH: the environment's own programs, which come first, and where Debian installs servers."""
_INSTALL_S = 300.0


def find(program: str) -> str | None:
    """Return the path of a program, or None."""
    if program == "initdb":
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        return str(versions[-1]) if versions else shutil.which(program)
    if program == "chromium":
        return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return next(
        filter(None, (shutil.which(program, path=path) for path in (_ENVIRONMENT, None, _SERVERS))), None
    )


def require(program: str) -> str:
    """Return the path of a program, or skip the test. ``executorch`` is that engine's binding, or a compiler for it."""
    if program == "executorch":
        if has_executorch_binding():
            return ""
        program = "c++"
    path = find(program)
    if path is None:
        skip(f"{program} is not installed: apt install {PACKAGES[program]}")
    return path


def require_packages(folder: Path) -> None:
    """Install the pinned npm packages of ``folder`` into its ``node_modules``, which git ignores, where they are missing.

    Without npm, or if it cannot install them, the test is skipped.
    """
    require("npm")
    lock, installed = folder / "package-lock.json", folder / "node_modules" / "installed-lock.json"
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # pytest's workers may all be here at once
        if installed.exists() and installed.read_bytes() == held.read():
            return
        command = ["npm", "ci"]
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        if ran.returncode != 0:
            skip(f"npm cannot install the packages of {folder.name}: {ran.stderr.strip()[-500:]}")
        shutil.copyfile(lock, installed)


def require_data(name: str) -> None:
    """Skip the test unless EDGEFL_DATA has the folder of a dataset, which nobody can install."""
    if not (Path(os.environ.get("EDGEFL_DATA", "/nowhere")) / name).is_dir():
        pytest.skip(f"EDGEFL_DATA has no folder {name}")


def skip(reason: str) -> NoReturn:
    """Skip the test, or fail it where EDGEFL_REQUIRE_PROGRAMS is set, as in CI."""
    if os.environ.get("EDGEFL_REQUIRE_PROGRAMS"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def skip_in_this_process() -> None:
    """Let modules, fixtures and tests skip when they open what a missing program would provide."""
    from benchmarks.browser import Browser
    from edgefl_device.engine.executorch import program

    if not has_executorch_binding():
        program.binding = lambda *_: Path(require("c++"))  # type: ignore[attr-defined]
    if find("chromium") is None:
        Browser.__enter__ = lambda _: skip(f"chromium is not installed: apt install {PACKAGES['chromium']}")  # type: ignore[method-assign]


def has_executorch_binding() -> bool:
    """Return True if the ExecuTorch engine can run: its binding is there, or a compiler to build it."""
    from edgefl.errors import ConfigError
    from edgefl_device.engine.executorch import build

    def refuse(_: str) -> None:
        raise ConfigError("the binding would have to be built")

    try:
        if os.environ.get("CXX") or find("c++"):
            return True
        build.binding(build.find_wheel(), refuse)
    except ConfigError:
        return False
    return True
