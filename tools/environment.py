"""Make an environment and say so in a few lines: ``python3.11 tools/environment.py .venv --torch --editable '.[server]'``.

It runs before there is an environment, so it needs the standard library only. Packages are installed by uv, which takes
seconds where pip takes minutes; by pip where uv is not to be had, or with the environment variable INSTALLER=pip.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
OLD_STAMP = ".installed"
"""Of checkouts whose one environment had all extras, with packages held back by some of them."""
DOT_S = 5.0
LAST_LINES = 15


class Failed(Exception):
    """A command ended with an error; the text is the end of what it said."""


class Environment:
    """A folder with a Python of its own."""

    def __init__(self, folder: Path, *, bytecode: bool) -> None:
        self.folder = folder
        self._bytecode = bytecode
        self.python = str(folder / "bin" / "python")
        self._uv: str | None = None

    def create(self) -> None:
        """The folder with pip in it; one of an older checkout is made anew, any other is kept."""
        if (self.folder / OLD_STAMP).exists():
            shutil.rmtree(self.folder)
        if not Path(self.python).exists():
            venv.create(self.folder, with_pip=True, symlinks=os.name == "posix")

    def find_uv(self) -> None:
        """uv from the path, else into the environment; none where that fails."""
        if os.environ.get("INSTALLER") == "pip":
            return
        own = self.folder / "bin" / "uv"
        if (found := shutil.which("uv")) is None and not own.exists():
            try:
                run([self.python, "-m", "pip", "install", "--quiet", "uv"])
            except Failed:
                return
        self._uv = found or str(own)

    def install_torch(self, requirement: str) -> None:
        """torch for processors: the package index has one for NVIDIA GPUs under the same number, of several GB.

        By pip alone: its settings are where people name the folders and indexes that have such wheels. TORCH names another
        requirement.
        """
        if "TORCH" in os.environ:
            self._pip([os.environ["TORCH"]])
        elif platform.system() != "Linux":
            self._pip([requirement])
        else:
            small = f"{requirement}+cpu"
            for arguments in ([small], [small, "--extra-index-url", CPU_WHEELS]):
                with contextlib.suppress(Failed):
                    self._pip(arguments)
                    return
            self._pip([requirement])

    def install(self, arguments: Sequence[str]) -> None:
        if self._uv is not None:
            try:
                compiled = ["--compile-bytecode"] if self._bytecode else []
                run([self._uv, "pip", "install", *compiled, "--python", self.python, *arguments])
                return
            except Failed:  # pip may know an index that uv does not
                pass
        self._pip(arguments)

    def _pip(self, arguments: Sequence[str]) -> None:
        run([self.python, "-m", "pip", "install", "--no-compile", *arguments])


def run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise Failed("\n".join(done.stdout.strip().splitlines()[-LAST_LINES:]))


class Step:
    """A line that begins at once, gets a dot now and then, and ends with the seconds."""

    def __init__(self, text: str) -> None:
        self._text, self._over = text, threading.Event()

    def __enter__(self) -> None:
        self._start = time.monotonic()
        print(f"  {self._text} ", end="", flush=True)
        self._thread = threading.Thread(target=self._dots, daemon=True)
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._thread.join()
        print("failed" if error else f"{time.monotonic() - self._start:.0f} s", flush=True)

    def _dots(self) -> None:
        while not self._over.wait(DOT_S):
            print(".", end="", flush=True)


def torch_requirement() -> str:
    """The exact release that pyproject.toml asks for."""
    import tomllib  # an older Python, which main refuses, has none

    project: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(text for text in project["optional-dependencies"]["server"] if text.startswith("torch=="))


def size_of(folder: Path) -> int:
    """Bytes on disk, as ``du`` counts them."""
    blocks = {}
    for place, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(place, name))
            blocks[status.st_dev, status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def make(
    folder: Path,
    requirements: Sequence[str],
    *,
    torch: bool,
    editable: bool,
    bytecode: bool,
    constraint: Path | None = None,
) -> None:
    environment = Environment(folder, bytecode=bytecode)
    start = time.monotonic()
    print(f"{folder}: an environment for {' '.join(requirements)}", flush=True)
    with Step(f"Python {platform.python_version()} (usually 5 to 15 s)"):
        environment.create()
        environment.find_uv()
    if torch:
        requirement = torch_requirement()
        with Step(f"{requirement} (usually 10 to 40 s, and a download of 190 MB the first time)"):
            environment.install_torch(requirement)
    with Step("all other packages (usually 5 to 60 s)"):
        limits = [] if constraint is None else ["--constraint", str(constraint)]
        wanted = [word for each in requirements for word in (["--editable"] * editable + [each])]
        environment.install([*limits, *wanted])
    print(f"{folder}: {size_of(folder) / 1e9:.2f} GB after {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    if sys.version_info < OLDEST:
        found = f"{sys.executable} is {platform.python_version()}"
        print(f"edgefl needs Python 3.11 or newer; {found}. Set PYTHON=/path/to/python3.11", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT")
    parser.add_argument("--torch", action="store_true", help="torch for processors first")
    parser.add_argument("--editable", action="store_true", help="the requirements are folders here")
    parser.add_argument(
        "--bytecode", action="store_true", help="modules are compiled now, not by whoever is first"
    )
    parser.add_argument("--constraint", type=Path, help="file with the exact versions of packages")
    given = parser.parse_args()
    try:
        make(
            given.folder,
            given.requirements,
            torch=given.torch,
            editable=given.editable,
            bytecode=given.bytecode,
            constraint=given.constraint,
        )
    except Failed as error:
        print(
            f"{error}\nerror: {given.folder} could not be set up; what was said last stands above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
