"""The C++ agent as it is built here: where it is, and what it and the libraries that it loads take on disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edgefl.wire.errors import EdgeflError

VARIABLE = "EDGEFL_AGENT_CPP"
BUILT = Path("build/agents/cpp/edgefl-agent")
NAME = "edgefl-agent"
_SYSTEM = re.compile(r"^(ld-linux.*|linux-vdso|libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.")
"""What every system has that runs a C++ program at all."""
_RUNTIME = "libexecutorch.so"
_OPENED = ("libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so")
"""What the engine opens beside its runtime when it starts: nothing names it in the binary."""
_LOADED = re.compile(r"^\s*(\S+) => (/\S+) \(", re.MULTILINE)


def find_agent() -> Path | None:
    """The binary that ``EDGEFL_AGENT_CPP`` names, else one that was built below this folder, else that of the path."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    if BUILT.exists():
        return BUILT
    found = shutil.which(NAME)
    return Path(found) if found else None


def sizes(agent: Path) -> Mapping[str, int]:
    """Bytes of the agent and of each library that it loads beside the system's, without their symbols. EdgeflError where it
    cannot be looked at."""
    found = {agent.name: _stripped(agent)}
    libraries = {name: Path(path) for name, path in _LOADED.findall(_answer(["ldd", str(agent)]))}
    if runtime := libraries.get(_RUNTIME):
        libraries |= {name: runtime.with_name(name) for name in _OPENED if runtime.with_name(name).exists()}
    for name, path in libraries.items():
        if not _SYSTEM.match(name):
            found[name] = _stripped(path.resolve())
    return found


def _stripped(file: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        copy = Path(folder) / file.name
        _answer(["strip", "--strip-unneeded", "-o", str(copy), str(file)])
        return copy.stat().st_size


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise EdgeflError(
            f"{command[0]} cannot be run: {error.strerror or error}; install binutils"
        ) from error
    if done.returncode:
        raise EdgeflError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout
