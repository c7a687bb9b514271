"""What a confined process may still do: each attempt is made in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgefl_device.sandbox.confine import Confinement

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what other systems lack is told, not done")

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, sys, socket, signal
from edgefl_device.sandbox.confine import Confinement, confine
missing = confine(Confinement(**json.loads(sys.argv[1])))
def attempt():
{body}
try:
    result = attempt()
except BaseException as error:
    result = type(error).__name__
print(json.dumps([result, missing]))
"""


def attempted(body: str, cwd: Path | None = None, **confinement: Any) -> tuple[Any, list[str]]:
    """What the attempt gives, or the name of its error; and what the system does not confine."""
    script = SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(confinement)],
        capture_output=True,
        text=True,
        check=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *([cwd] if cwd else []))))},
    )
    result, missing = json.loads(done.stdout)
    return result, missing


def unless_missing(missing: list[str], what: str) -> None:
    if any(what in each for each in missing):
        pytest.skip(f"not on this machine: {missing}")


ATTACKS = """
import ctypes, fcntl, mmap, platform, resource, struct
from edgefl_device.sandbox.calls import MACHINES, _GROUPS
libc = ctypes.CDLL(None, use_errno=True)
parent, other = os.getppid(), sys.executable
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
machine = MACHINES[platform.machine()]
rows = [row.split() for group in _GROUPS for row in group.split(",")]
number = {row[0]: int(row[machine.column]) for row in rows if row[machine.column] != "-"}
attacks = {
    "a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "a datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "a pair of sockets": lambda: socket.socketpair(),
    "a program": lambda: os.execv("/bin/true", ["true"]),
    "a program beside it": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "a process": lambda: os.fork() or os._exit(0),
    "a signal": lambda: os.kill(parent, 0),
    "a signal to a thread": lambda: call(machine.tgkill, parent, parent, 0),
    "a signal by number": lambda: call(number["tkill"], parent, 0),
    "limits of its agent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (9000, 9000)),
    "environment of its agent": lambda: open(f"/proc/{parent}/environ").read(),
    "processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "processors of its agent": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, 5),
    "priority of its agent": lambda: os.setpriority(os.PRIO_PROCESS, parent, 5),
    "scheduler": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "priority of its disk": lambda: call(number["ioprio_set"], 1, 0, 3 << 13),
    "memory in a file": lambda: os.memfd_create("attack"),
    "shared memory": lambda: call(number["shmget"], 0, 1 << 20, 0o1600),
    "semaphores": lambda: call(number["semget"], 0, 1, 0o1600),
    "a message queue": lambda: call(number["msgget"], 0, 0o1600),
    "a queue with a name": lambda: call(number["mq_open"], b"attack", os.O_CREAT | os.O_RDWR, 0o600, None),
    "mode": lambda: os.chmod(mine, 0o777),
    "mode of an open file": lambda: os.chmod(os.open(other, os.O_RDONLY), 0o755),
    "owner": lambda: os.chown(mine, os.getuid(), os.getgid()),
    "attribute": lambda: os.setxattr(mine, "user.attack", b"1"),
    "no attribute": lambda: os.removexattr(mine, "user.attack"),
    "time": lambda: os.utime(mine),
    "length": lambda: os.truncate(other, 0),
    "signals to its agent by a pipe": lambda: fcntl.fcntl(pipe, 8, parent),
    "the same by another call": lambda: fcntl.fcntl(pipe, 15, struct.pack("ii", 1, parent)),
    "which signal": lambda: fcntl.fcntl(pipe, 10, signal.SIGKILL),
    "a lease": lambda: fcntl.fcntl(os.open(mine, os.O_RDONLY), 1024, fcntl.F_WRLCK),
    "a watched folder": lambda: fcntl.fcntl(os.open(".", os.O_RDONLY), 1026, 2),
    "memory in a pipe": lambda: fcntl.fcntl(pipe, 1031, 1 << 20),
    "asynchronous input": lambda: call(number["io_setup"], 1, ctypes.byref(ctypes.c_ulong(0))),
    "watches": lambda: call(number["inotify_init1"], 0),
    "the whole disk": lambda: call(number["syncfs"], 1),
    "personality": lambda: call(number["personality"], 0x0040000),
    "flags": lambda: call(machine.ioctl, os.open(other, os.O_RDONLY), 0x40086602, ctypes.byref(ctypes.c_int(0))),
}
mine, pipe = "page", os.pipe()[1]
open(mine, "w").close()
def outcome(attack):
    try:
        attack()
    except OSError as error:
        return type(error).__name__
    return "it worked"
return {name: outcome(attack) for name, attack in attacks.items()}
"""


def test_it_affects_no_other_process_and_nothing_outside_its_folder(tmp_path: Path) -> None:
    body = f"os.chdir({str(tmp_path)!r}){ATTACKS}"
    results, missing = attempted(body, writable=str(tmp_path))
    unless_missing(missing, "seccomp")
    assert {name: result for name, result in results.items() if result != "PermissionError"} == {}
    assert len(results) == 40


def test_a_process_of_root_becomes_another_user() -> None:
    uids, missing = attempted("return [os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()]")
    assert 0 not in uids or "a user other than root" in "".join(missing)


def test_it_reads_libraries_and_writes_one_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (tmp_path / "pages").mkdir()
    writable = str(tmp_path / "pages")
    result, missing = attempted(f"return open({str(tmp_path / 'secret')!r}).read()", writable=writable)
    unless_missing(missing, "Landlock")
    assert result == "PermissionError"
    for target, expected in ((tmp_path / "other", "PermissionError"), (tmp_path / "pages" / "page", 3)):
        body = f"return open({str(target)!r}, 'w').write('abc')"
        assert attempted(body, writable=writable)[0] == expected
    body = f"import tempfile\nreturn tempfile.TemporaryFile(dir={writable!r}).write(b'abc')"
    assert attempted(body, writable=writable)[0] == 3
    assert attempted("import zoneinfo, colorsys\nreturn 1", writable=writable)[0] == 1


def test_a_folder_that_modules_are_looked_for_in_is_not_read(tmp_path: Path) -> None:
    """As the one is that an agent is started in, with its data and keys below it."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "secret").write_text("key")
    for name in (str(tmp_path / "below" / "secret"), "below/secret", str(ROOT / "pyproject.toml")):
        result, missing = attempted(f"return open({name!r}).read()", cwd=tmp_path)
        unless_missing(missing, "Landlock")
        assert result == "PermissionError"
    body = "import numpy, onnxruntime, edgefl.wire.limits, edgefl_device.engine.onnx\nreturn 1"
    assert attempted(body, cwd=tmp_path)[0] == 1


def test_memory_files_and_core_dumps_are_bounded(tmp_path: Path) -> None:
    assert attempted("return len(bytes(1 << 30))", memory_bytes=1 << 29)[0] == "MemoryError"
    body = f"f = open({str(tmp_path / 'large')!r}, 'wb')\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    body += "f.write(bytes(1 << 20))\nf.flush()"
    assert attempted(body, file_bytes=1 << 16, writable=str(tmp_path))[0] == "OSError"
    body = "import resource\nreturn resource.getrlimit(resource.RLIMIT_CORE)[0]"
    assert attempted(body)[0] == 0


def test_threads_and_numpy_still_work() -> None:
    body = "import threading, numpy as np\n"
    body += (
        "t = threading.Thread(target=lambda: None)\nt.start()\nt.join()\nreturn int(np.ones(3) @ np.ones(3))"
    )
    assert attempted(body)[0] == 3


def test_what_is_confined_is_plain_data() -> None:
    assert Confinement() == Confinement(memory_bytes=0, file_bytes=0, cpu_s=0, writable="", readable=())
