"""Binding between this runtime and the installed ExecuTorch: one C++ file, compiled once on the machine.

A binding inside the package is used first, then one in the user's cache; else it is compiled. Its file name depends
on everything that it is compiled from, so that another release of ExecuTorch or edgefl never loads it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.system.distribution import install
from edgefl.wire import folders
from edgefl_device.engine import platform_problem

LIBRARIES = (
    "executorch",
    "executorch_threadpool",
    "executorch_kernels_optimized",
    "executorch_backend_xnnpack",
)
"""In the order in which they need each other. The last two only register kernels and a delegate."""

_LINKED = LIBRARIES[:2]
_DEFINITIONS = ("C10_USING_CUSTOM_GENERATED_MACROS", "ET_EVENT_TRACER_ENABLED")
_INCLUDES = ("include", "include/executorch/runtime/core/portable_type/c10")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", *(f"-D{name}" for name in _DEFINITIONS))
_SOURCE = Path(__file__).with_name("native.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_MOST_TEXT = 400
_INSTALL = f"install it by `{install('executorch')}`, or use `engine` onnx"
_HELP = (
    "install a C++ compiler (Debian: `apt install g++`) or name one in $CXX; or run `edgefl device build-engine --out "
    "FOLDER` on a like machine and put the file beside {place}; or use `engine` onnx"
)


@dataclass(frozen=True)
class ExecuTorchWheel:
    """Folder and version of the installed ExecuTorch package."""

    root: Path
    version: str

    def library(self, name: str) -> Path:
        """Return the path of the shared library ``name``.

        Raises:
            ConfigError: The package does not contain the library.
        """
        path = self.root / "lib" / f"lib{name}{_suffix()}"
        if not path.exists():
            raise ConfigError(
                f"executorch {self.version} at {self.root} has no {path.name}: {_INSTALL}", library=path.name
            )
        return path


def find_wheel() -> ExecuTorchWheel:
    """Find the installed ExecuTorch without importing it, because its Python modules need torch.

    Raises:
        ConfigError: ExecuTorch is not installed.
    """
    spec = importlib.util.find_spec("executorch")
    roots = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    for root in roots:
        if (root / "lib" / f"lib{LIBRARIES[0]}{_suffix()}").exists():
            return ExecuTorchWheel(root, _installed_version())
    remedy = platform_problem() or _INSTALL
    raise ConfigError(f"this engine needs the package executorch, which is not installed: {remedy}")


def binding(wheel: ExecuTorchWheel, say: Callable[[str], None]) -> Path:
    """Return the path of the compiled binding for ``wheel``; compile it if there is none, after a message to ``say``.

    Raises:
        ConfigError: The binding cannot be compiled.
    """
    name = _file_name(wheel)
    if (_SOURCE.parent / name).exists():
        return _SOURCE.parent / name
    folder = folders.cache("the ExecuTorch binding", "XDG_CACHE_HOME, or use `engine` onnx")
    present = os.access(folder / name, os.R_OK)
    if present and _is_ours(folder / name):
        return folder / name
    say("building the ExecuTorch binding, once")
    return build(wheel, folder, again=present)


def _is_ours(file: Path) -> bool:
    """Return True if no other user can write the file or its folder; this process is going to load it as code."""
    if not hasattr(os, "getuid"):
        return True
    facts = [place.stat() for place in (file, file.parent)]
    return all(each.st_uid in (0, os.getuid()) and not each.st_mode & stat.S_IWOTH for each in facts)


def build_engine(into: Path | None = None) -> tuple[Path, str]:
    """Compile the binding to the installed executorch now.

    Args:
        into: Folder of the binding; None: the package, where a device looks first.

    Returns:
        Path of the binding, and the version of executorch.

    Raises:
        ConfigError: executorch or a C++ compiler is missing.
    """
    wheel = find_wheel()
    return build(wheel, into or _SOURCE.parent), wheel.version


def build(wheel: ExecuTorchWheel, folder: Path, *, again: bool = True) -> Path:
    """Compile the binding into ``folder``, atomically and in one process at a time. Return its path.

    Args:
        wheel: The installed ExecuTorch.
        folder: Folder of the binding, created if needed.
        again: False returns the file that another process has compiled meanwhile; True compiles in any case.

    Raises:
        ConfigError: A compiler or header is missing, or compilation fails.
    """
    target = folder / _file_name(wheel)
    # As system headers: their warnings are not ours.
    includes = [word for path in _INCLUDES for word in ("-isystem", str(wheel.root / path))]
    command = [*_compiler(), *_FLAGS, *includes, str(_SOURCE)]
    command += [f"-L{wheel.root / 'lib'}", *(f"-l{name}" for name in _LINKED)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if again or not target.exists():
                _compile(command, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the ExecuTorch binding to {folder} ({error.strerror or error}): make it writable, name a folder "
            "that is (`edgefl device build-engine --out FOLDER`, else $XDG_CACHE_HOME), or use `engine` onnx",
            folder=str(folder),
        ) from error
    return target


def _compile(command: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, errors="replace", check=False
            )
            wrong = _first_error(done.stderr) if done.returncode else ""
        except OSError as error:
            wrong = f"it cannot be run ({error.strerror or error})"
        if wrong:
            raise ConfigError(
                f"{command[0]} cannot compile the ExecuTorch binding: {wrong}; " + _HELP.format(place=_SOURCE)
            )
        made.replace(target)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a lock on ``folder``, if the system has locks, so that one process at a time compiles into it."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    command = chosen or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(
            f"the ExecuTorch binding has to be compiled once, and there is no {' '.join(chosen) or 'C++ compiler'}: "
            + _HELP.format(place=_SOURCE)
        )
    return command


def _file_name(wheel: ExecuTorchWheel) -> str:
    made_of = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:12]
    return f"native-{wheel.version}-{platform.machine()}-{made_of}{_suffix()}"


def _installed_version() -> str:
    try:
        return version("executorch")
    except PackageNotFoundError:
        return "unknown"


def _suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line] or lines or ["no message"]
    return telling[0][:_MOST_TEXT]
