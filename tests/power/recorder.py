"""What a process does to the files below a folder, in order, as strace sees it; what it sends is a mark in between."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests import needs

Kind = Literal["create", "write", "truncate", "sync", "rename", "link", "unlink", "mkdir", "mark"]

_CALLS = (
    "open,openat,creat,write,pwrite64,lseek,ftruncate,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,sendto"
)
_LINE = re.compile(r"^(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FILE = re.compile(r"^(\d+)<([^>]*)>")
_NAME = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:\\x[0-9a-f]{2})*)"')
_RESULT = re.compile(r"\)\s+= (-?\d+)")
_UNFINISHED = " <unfinished ...>"
_LONGEST_S = 900


@dataclass(frozen=True)
class Op:
    """One operation. ``path`` is absolute; ``target`` the new name of a renamed or linked file; ``data`` also what a mark
    sent."""

    kind: Kind
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""


def record(module: str, arguments: Sequence[str], below: Path, log: Path) -> list[Op]:
    """Run ``python -m module arguments`` to its end. Skip the test if strace is missing, or may not trace."""
    return record_command([sys.executable, "-m", module, *arguments], below, log)


def record_command(
    command: Sequence[str], below: Path, log: Path, *, changed_root: Path | None = None
) -> list[Op]:
    """Run ``command`` to its end. ``changed_root`` is the folder that its processes see as the root, if it is chroot."""
    algorithm = needs.require("strace")
    tracing = [
        algorithm,
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-y",
        "-xx",
        "-s",
        "4000000",
        "-e",
        f"trace={_CALLS}",
        "-o",
        str(log),
    ]
    ended = subprocess.run(
        [*tracing, *command], capture_output=True, text=True, timeout=_LONGEST_S, check=False
    )
    if "PTRACE" in ended.stderr or "ptrace" in ended.stderr:
        pytest.skip(f"strace may not trace here: {ended.stderr[-200:]}")
    assert ended.returncode == 0, ended.stderr
    return [
        op for op in _parsed(log, changed_root) if op.kind == "mark" or f"{op.path}/".startswith(f"{below}/")
    ]


def _parsed(log: Path, changed_root: Path | None) -> Iterator[Op]:
    begun: dict[str, str] = {}
    offsets: dict[tuple[str, str], int] = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for raw in lines:
            line = raw.rstrip("\n")
            if resumed := _RESUMED.match(line):
                call, rest = resumed["call"], begun.pop(resumed["pid"], "") + resumed["rest"]
            elif found := _LINE.match(line):
                call, rest = found["call"], found["rest"]
                if call in ("sendto", "write") and (mark := _mark(call, rest)) is not None:
                    yield mark  # when it begins: what is sent may be read before the call returns
                    continue
                if rest.endswith(_UNFINISHED):
                    begun[found["pid"]] = rest.removesuffix(_UNFINISHED)
                    continue
            else:
                continue
            if (result := _RESULT.search(rest)) is not None and int(result[1]) >= 0:
                yield from _ops(call, rest, offsets, changed_root)


def _mark(call: str, rest: str) -> Op | None:
    """Bytes that leave the process: through a socket, or its standard output."""
    file = _FILE.match(rest)
    leaves = file is not None and (call == "sendto" or file[1] == "1")
    return Op("mark", data=_strings(rest)[0]) if leaves and _strings(rest) else None


def _strings(text: str) -> list[bytes]:
    return [bytes.fromhex(found.replace("\\x", "")) for found in _STRING.findall(text)]


def _path(text: str) -> str:
    """strace writes the path of a descriptor in hexadecimal too."""
    return bytes.fromhex(text.replace("\\x", "")).decode() if text.startswith("\\x") else text


def _names(rest: str, changed_root: Path | None) -> list[str]:
    """Return the paths among a call's arguments: absolute, if the call names the folder of a relative one."""
    paths = []
    for folder, name in _NAME.findall(rest):
        path = os.fsdecode(bytes.fromhex(name.replace("\\x", "")))
        if path.startswith("/"):
            path = f"{changed_root or ''}{os.path.normpath('/' + path.lstrip('/'))}"
        elif folder:
            path = os.path.normpath(f"{_path(folder)}/{path}")
        paths.append(path)
    return paths


def _ops(
    call: str, rest: str, offsets: dict[tuple[str, str], int], changed_root: Path | None
) -> Iterator[Op]:
    file = _FILE.match(rest)
    held = (file[1], _path(file[2])) if file else ("", "")
    if call in _NAMING:
        yield from _NAMING[call](rest, _names(rest, changed_root), offsets)
    elif call in ("fsync", "fdatasync"):
        yield Op("sync", held[1])
    elif call == "lseek":
        offsets[held] = int(_RESULT.findall(rest)[-1])
    elif call == "ftruncate":
        yield Op("truncate", held[1], offset=int(rest.split(",", 2)[1].split(")", 1)[0]))
    elif call == "pwrite64":
        (data,) = _strings(rest)
        yield Op("write", held[1], offset=int(rest.rsplit(")", 1)[0].rsplit(",", 1)[1]), data=data)
    elif call == "write" and held[1].startswith("/"):
        data = b"".join(_strings(rest))
        yield Op("write", held[1], offset=offsets.get(held, 0), data=data)
        offsets[held] = offsets.get(held, 0) + len(data)


def _opened(rest: str, named: list[str], offsets: dict[tuple[str, str], int]) -> Iterator[Op]:
    number, path = re.findall(r"= (\d+)<([^>]*)>", rest)[-1]
    offsets[number, _path(path)] = 0
    if "O_CREAT" in rest:
        yield Op("create", _path(path))
    if "O_TRUNC" in rest:
        yield Op("truncate", _path(path))


def _renamed(_rest: str, named: list[str], _offsets: object) -> Iterator[Op]:
    yield Op("rename", named[0], target=named[1])


def _linked(_rest: str, named: list[str], _offsets: object) -> Iterator[Op]:
    yield Op("link", named[0], target=named[1])


def _unlinked(_rest: str, named: list[str], _offsets: object) -> Iterator[Op]:
    yield Op("unlink", named[0])


def _folder_made(_rest: str, named: list[str], _offsets: object) -> Iterator[Op]:
    yield Op("mkdir", named[0])


_Naming = Callable[[str, list[str], dict[tuple[str, str], int]], Iterator[Op]]
_NAMING: dict[str, _Naming] = {
    **dict.fromkeys(("open", "openat", "creat"), _opened),
    **dict.fromkeys(("rename", "renameat", "renameat2"), _renamed),
    **dict.fromkeys(("link", "linkat"), _linked),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), _unlinked),
    **dict.fromkeys(("mkdir", "mkdirat"), _folder_made),
}
