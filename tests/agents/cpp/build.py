"""The C++ agent as a test finds it: built once, from the working copy, into build/agents/cpp."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import needs
from tests.support.commands import run_command

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "agents" / "cpp"
PACKAGES = ("libmosquitto", "openssl", "sqlite3", "libzstd", "zlib", "libcurl", "libpng", "libjpeg")
DEBIAN = (
    "libmosquitto-dev libssl-dev libsqlite3-dev libzstd-dev zlib1g-dev libcurl4-openssl-dev libpng-dev libjpeg-dev "
    "libmsgpack-cxx-dev nlohmann-json3-dev libcli11-dev doctest-dev ninja-build ccache pkg-config g++"
)
BUILD_S = 1800


@functools.cache
def build() -> Path:
    """The folder of the build. EDGEFL_CPP_BUILD names one that is taken as it is.

    If something is missing to build it, the test is skipped.
    """
    if named := os.environ.get("EDGEFL_CPP_BUILD"):
        return Path(named)
    cmake = needs.find("cmake")
    missing = [name for name in ("ninja", "g++", "pkg-config") if shutil.which(name) is None]
    if cmake is None or missing:
        needs.skip(f"{', '.join(missing) or 'cmake'} is not installed: apt install {DEBIAN}")
    if subprocess.run(["pkg-config", "--exists", *PACKAGES], check=False).returncode:
        needs.skip(f"headers of {', '.join(PACKAGES)} are not installed: apt install {DEBIAN}")
    folder = ROOT / "build" / "agents" / "cpp"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "cpp.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers may all be here at once
        _run(cmake, "-S", SOURCE, "-B", folder, "-G", "Ninja", f"-DEDGEFL_PYTHON={sys.executable}")
        _run(cmake, "--build", folder)
    return folder


def program(name: str) -> Path:
    """A program of the build."""
    path = build() / name
    assert path.is_file(), f"{path} was not built"
    return path


def run_ctest(*words: object) -> subprocess.CompletedProcess[str]:
    """CMake's runner of tests in the build; one at a time, as tests of it share folders."""
    folder = build()
    with (folder / "ctest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return run_command(_ctest(), "--test-dir", folder, *words, timeout=BUILD_S)


def embedded() -> Path:
    """The program of a project of its own that embeds the installed library."""
    ran = run_ctest("-R", "^consumer$")
    assert ran.returncode == 0, ran.stdout[-3000:]
    return program("tests/consumer/embed")


def _ctest() -> Path:
    found = needs.find("ctest")
    if found is None:
        needs.skip("ctest is not installed: it comes with the package cmake")
    return Path(found)


def _run(*words: object) -> None:
    ran = run_command(*words, timeout=BUILD_S)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
