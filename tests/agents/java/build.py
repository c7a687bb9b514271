"""org.edgefl and the classes of a test, compiled by what agents/java's own CMake has: javac and jar."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.agents.cpp.build import ROOT
from tests.support.commands import run_command

SOURCE = ROOT / "agents" / "java"
BUILD_S = 600


@dataclass(frozen=True)
class Classes:
    """A path of classes, and the folder of the native library."""

    path: str
    library: Path

    def command(self, name: str, *words: object) -> list[str]:
        """A JVM that runs the class ``name``; misuse of JNI ends it."""
        options = ["-Xcheck:jni", "-Xmx256m", f"-Djava.library.path={self.library}", "-cp", self.path]
        return ["java", *options, name, *map(str, words)]


def compiled(agent: Path, folder: Path, sources: Sequence[Path]) -> Classes:
    """The jar and the native library, against the C++ agent that is built in ``agent``, and the classes of ``sources``."""
    installed = folder / "installed"
    _run(_cmake(), "--install", agent, "--prefix", installed)
    _run(_cmake(), "-S", SOURCE, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={installed}")
    _run(_cmake(), "--build", folder / "build", "--target", "agents-java")
    jar = folder / "build" / "edgefl.jar"
    _run("javac", "--release", "11", "-Xlint:all", "-Werror", "-cp", jar, "-d", folder / "classes", *sources)
    return Classes(f"{jar}:{folder / 'classes'}", folder / "build")


def _cmake() -> str:
    """Beside this Python, or in the path, where the C++ agent was built by it."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("cmake", path=places)
    assert found is not None
    return found


def _run(*words: object) -> None:
    done = run_command(*words, timeout=BUILD_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
