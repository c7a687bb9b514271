"""Takes from this process what an engine does not need: memory without end, files, the network, other programs.

Everything here works without privileges. What the system lacks is named, and the rest is done: the caller tells people.

* Resource limits (any Unix): address space, processor time, open files, size of written files, no core dumps.
* Landlock (Linux 5.13): of the file system it reads what Python and libraries are made of, and writes in one folder; from
  6.7 on no TCP, from 6.12 on no signals to other processes.
* seccomp (Linux on x86-64 and AArch64): no sockets, no other programs or processes, no look into others.
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

_PACKAGES = (
    "device_runtime",
    "edgefl",
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
_EPERM, _ENOSYS = 1, 38

# -- Landlock: include/uapi/linux/landlock.h; the numbers of its calls are the same on all processors
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_FROM, _SCOPES_FROM = 4, 6
_NETWORK, _SCOPES = 3, 3

# -- seccomp: include/uapi/linux/seccomp.h, and linux/filter.h
_SET_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_EQUAL, _JUMP_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
_NOT_THERE = 0x00050000 | _ENOSYS
_THREAD = 0x00010000  # CLONE_THREAD
_CLONE3 = 435


@dataclass(frozen=True)
class _Machine:
    """A processor as seccomp names it, the numbers of the calls seccomp and clone, and those of what is refused."""

    audit: int
    seccomp: int
    clone: int
    refused: tuple[int, ...]


_MACHINES = {
    # socket connect accept sendto bind listen socketpair fork vfork execve kill ptrace mount keyctl and their like
    "x86_64": _Machine(
        0xC000003E,
        317,
        56,
        (41, 42, 43, 44, 49, 50, 53, 57, 58, 59, 62, 101, 161, 165, 166, 248, 249, 250, 272, 288, 298, 304, 308, 310, 311,
         321, 322, 323, 424, 425, 434, 438),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        277,
        220,
        (39, 40, 51, 97, 117, 129, 198, 199, 200, 201, 202, 203, 206, 217, 218, 219, 221, 241, 242, 265, 268, 270, 271, 280,
         281, 282, 424, 425, 434, 438),
    ),
}  # fmt: skip
_X32 = 0x40000000  # the second set of numbers on x86-64


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What is left to the process. Sizes in bytes, ``cpu_s`` in seconds; 0 sets no limit. ``writable``: the folder for what
    a step keeps on the disk. ``readable``: more that is read, such as a binding's folder."""

    memory_bytes: int = 0
    file_bytes: int = 0
    cpu_s: int = 0
    writable: str = ""
    readable: tuple[str, ...] = ()


def confine(wanted: Confinement) -> tuple[str, ...]:
    """Confine this process for good; to be called before other threads begin. Returns what the system does not do."""
    steps: tuple[tuple[str, Callable[[Confinement], None]], ...] = (
        ("resource limits", _limit_resources),
        ("a file system that is read only, and no TCP (Landlock)", _restrict_files),
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
        for path in _read_by_libraries(wanted.readable):
            _allow(rules, path, _READ)
        writing = _WRITE_FILE | (_TRUNCATE & files)
        with contextlib.suppress(
            OSError
        ):  # a system without; a process starts its own peak of memory anew there
            _allow(rules, "/proc/self/clear_refs", writing)
        if wanted.writable:
            _allow(rules, wanted.writable, _READ_FILE | _READ_DIR | _MAKE_FILE | _REMOVE_FILE | writing)
        _no_new_privileges()
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _read_by_libraries(more: Iterable[str]) -> list[str]:
    """Where Python, its packages and the system's libraries lie, and what these ask of the processor.

    Not what else modules are looked for in: that may be the folder in which the agent was started, or a checkout, and
    keys and data lie below.
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
    wanted = dict.fromkeys((*system, *_of_python(), *_of_packages(), *more))
    return [path for path in wanted if path and Path(path).exists()]


def _of_python() -> Iterator[str]:
    """Python's own modules and libraries, and the folders that packages are installed in, which hold nothing else."""
    yield str(Path(os.__file__).parent)
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix):
        yield from (str(Path(prefix) / name) for name in ("lib", "lib64"))
    yield from (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _of_packages() -> Iterator[str]:
    """The packages that a process of an engine is made of, wherever they lie, and nothing of what lies beside them."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ())
        yield from places or ([spec.origin] if spec.has_location and spec.origin else [])
        yield from (str(Path(place).with_name(f"{name}.libs")) for place in places)


def _allow(rules: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not Path(path).is_dir():
            rights &= _READ_FILE | _WRITE_FILE | _EXECUTE | _TRUNCATE
        _call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _filter_calls(_: Confinement) -> None:
    machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        raise OSError(f"not on {sys.platform} {platform.machine()}")
    program = _program(machine)
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    room = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("@HP", len(program), ctypes.addressof(room))
    _no_new_privileges()
    _call(machine.seccomp, _SET_FILTER, _ALL_THREADS, whole)


def _program(machine: _Machine) -> list[tuple[int, int, int, int]]:
    """The filter. A thread is made, and no process: clone3 says so in memory, which no filter reads, so it is not there and
    libraries take clone, whose first argument says it (its lower half lies first on these processors)."""
    refuse = len(machine.refused)
    return [
        (_LOAD, 0, 0, 4),  # the processor whose numbers these are
        (_JUMP_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _NOT_THERE),
        (_JUMP_EQUAL, 0, 4, machine.clone),
        (_LOAD, 0, 0, 16),
        (_JUMP_BITS, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_LEAST, refuse + 1, 0, _X32),
        *((_JUMP_EQUAL, refuse - at, 0, number) for at, number in enumerate(machine.refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def _no_new_privileges() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call that has no name in libc; OSError if it fails."""
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
