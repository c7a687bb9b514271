"""Confinement of the current process to what an engine needs: limits on memory, files, network and other programs.

All of it works without privileges. Features that the system lacks are returned for a report; all others are used.

* Resource limits (any Unix): address space, processor time, open files, size of written files, no core dumps.
* Landlock (Linux 5.13): the process reads only Python and libraries, and writes only in one folder. From 6.7 on no
  TCP, from 6.12 on no signals to other processes.
* A process of root becomes the user 65534.
* seccomp (Linux on x86-64 and AArch64): no sockets, no other programs, no effect on other processes, no memory that
  the limits do not count, no change of a file's attributes (:mod:`edgefl_device.sandbox.calls`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl_device.sandbox.calls import MACHINES, filter_program

_PACKAGES = (
    "edgefl",
    "edgefl_device",
    "backports",
    "cryptography",
    "executorch",
    "msgspec",
    "numpy",
    "onnxruntime",
    "safetensors",
    "typing_extensions",
)
_NO_NEW_PRIVILEGES = 38

# -- Landlock: include/uapi/linux/landlock.h; the numbers of its calls are the same on all processors
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_FROM, _SCOPES_FROM = 4, 6
_NETWORK, _SCOPES = 3, 3

# -- the user that a process of root becomes: include/uapi/linux/capability.h, prctl.h
_NOBODY = 65534
_SET_DUMPABLE, _KEEP_CAPABILITIES = 4, 8
_CAPABILITIES_3, _READ_SEARCH = 0x20080522, 1 << 2

# -- seccomp: include/uapi/linux/seccomp.h
_SET_FILTER, _ALL_THREADS = 1, 1


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """Rights of a confined process. Sizes are in bytes, ``cpu_s`` in seconds; 0 sets no limit.

    ``writable`` is the folder for files of a step, ``readable`` lists more files to read, such as a binding's folder.
    """

    memory_bytes: int = 0
    file_bytes: int = 0
    cpu_s: int = 0
    writable: str = ""
    readable: tuple[str, ...] = ()


def confine(wanted: Confinement) -> tuple[str, ...]:
    """Confine this process irrevocably. Call it before other threads begin.

    Args:
        wanted: Rights that remain.

    Returns:
        The protections that this system does not support, each with the reason.
    """
    steps: tuple[tuple[str, Callable[[Confinement], None]], ...] = (
        ("resource limits", _limit_resources),
        ("a file system that is read only, and no TCP (Landlock)", _restrict_files),
        ("a user other than root", _leave_root),
        ("no sockets and no other programs (seccomp)", _filter_calls),
    )
    missing = []
    for name, step in steps:
        try:
            step(wanted)
        except (OSError, ImportError, AttributeError, ValueError) as error:
            missing.append(f"{name}: {error}")
    return tuple(missing)


def _limit_resources(wanted: Confinement) -> None:
    if sys.platform == "win32":
        raise OSError(f"not on {sys.platform}")
    import resource

    limits = {
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_AS: wanted.memory_bytes,
        resource.RLIMIT_FSIZE: wanted.file_bytes,
        resource.RLIMIT_CPU: wanted.cpu_s,
    }
    for kind, most in limits.items():
        if most:
            _, hard = resource.getrlimit(kind)
            value = 0 if kind == resource.RLIMIT_CORE else most
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def _restrict_files(wanted: Confinement) -> None:
    version = _call(_CREATE_RULESET, None, 0, _VERSION)
    files = _FILES_BY_VERSION[min(version, max(_FILES_BY_VERSION))]
    fields = [files]
    fields += [_NETWORK] if version >= _NETWORK_FROM else []
    fields += [_SCOPES] if version >= _SCOPES_FROM else []
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in _library_files(wanted.readable):
            _allow(rules, path, _READ)
        writing = _WRITE_FILE | (_TRUNCATE & files)
        with contextlib.suppress(
            OSError
        ):  # a system without; a process starts its own peak of memory anew there
            _allow(rules, "/proc/self/clear_refs", writing)
        if wanted.writable:
            _allow(rules, wanted.writable, _READ_FILE | _READ_DIR | _MAKE_FILE | _REMOVE_FILE | writing)
        _prctl(_NO_NEW_PRIVILEGES, 1)
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _library_files(more: Iterable[str]) -> list[str]:
    """Return the folders of Python, its packages and system libraries, the files that describe the processor, and those
    of ``more``.

    The rest of ``sys.path`` is left out: it may be the agent's working folder or a checkout, with keys and data below.
    Paths that do not exist are left out, too.
    """
    system = (
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/proc",
        "/sys/devices/system",
        "/dev/null",
        "/dev/urandom",
    )
    wanted = dict.fromkeys((*system, *_python_folders(), *_package_folders(), *more))
    return [path for path in wanted if path and Path(path).exists()]


def _python_folders() -> Iterator[str]:
    """Yield the folders of Python's modules and libraries, and of installed packages."""
    yield str(Path(os.__file__).parent)
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix):
        yield from (str(Path(prefix) / name) for name in ("lib", "lib64"))
    yield from (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _package_folders() -> Iterator[str]:
    """Yield the folders of the packages that an engine's process imports, wherever they are installed."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ())
        yield from places or ([spec.origin] if spec.has_location and spec.origin else [])
        yield from (str(Path(place).with_name(f"{name}.libs")) for place in places)


def _allow(rules: int, path: str, rights: int) -> None:
    if sys.platform != "linux":
        raise OSError(f"not on {sys.platform}")
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not Path(path).is_dir():
            rights &= _READ_FILE | _WRITE_FILE | _EXECUTE | _TRUNCATE
        _call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _leave_root(wanted: Confinement) -> None:
    """If this process runs as root, become an unprivileged user: root could read the environment of every process.

    One capability stays, to read files despite their mode, because Python's packages may be in root's home. Landlock
    limits what it opens.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return
    if sys.platform != "linux":
        raise OSError(f"not on {sys.platform}")
    if wanted.writable:
        os.chown(wanted.writable, _NOBODY, _NOBODY)
    _prctl(_KEEP_CAPABILITIES, 1)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    sets = struct.pack("=6I", _READ_SEARCH, _READ_SEARCH, 0, 0, 0, 0)
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(_SET_DUMPABLE, 1)  # else /proc/self belongs to root


def _filter_calls(_: Confinement) -> None:
    machine = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        raise OSError(f"not on {sys.platform} {platform.machine()}")
    code = filter_program(machine)
    room = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("@HP", len(code) // 8, ctypes.addressof(room))
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _call(machine.seccomp, _SET_FILTER, _ALL_THREADS, whole)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call by number, for calls without a function in libc.

    Raises:
        OSError: The call fails, or the system is not Linux.
    """
    if sys.platform != "linux":
        raise OSError(f"not on {sys.platform}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    result = int(
        syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments),
        )
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
