"""Roots of Debian to install in, and the package's unit run in one as a service manager runs it.

With ``EDGEFL_DEB_ARCH=arm64`` roots and packages are of that architecture, whose programs qemu runs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.support.commands import run_command
from tests.wire.mqtt.events import PATIENCE_S
from tools.board.root import only_run, register_emulator, unregister_emulator

ROOT = Path(__file__).parents[3]
FILES = ROOT / "agents" / "cpp" / "debian"
BUILT = ROOT / "build" / "deb"
LONGEST_S = 1800
UNIT = "lib/systemd/system/edgefl-agent.service"
SYSTEMCTL_LOG = "run/systemctl.log"


def require_root() -> None:
    """Skip the test unless a root of Debian can be made here."""
    for program in ("dpkg-deb", "mmdebstrap"):
        needs.require(program)
    if os.geteuid() != 0:
        pytest.skip("a root of Debian is made and entered by root only")
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no overlay file system")
    if is_emulated():
        needs.require("qemu-aarch64-static")
        emulate()


@cache
def emulate() -> None:
    """Have the kernel run programs of arm64 until this process ends. BoardError if an emulated board runs already."""
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    until_exit.enter_context(only_run())
    if register_emulator():
        until_exit.callback(unregister_emulator)


def build_package(revision: int) -> Path:
    """Return the package of this checkout with a Debian revision. EDGEFL_DEB_PACKAGES names a folder with packages that are
    used as they are."""
    folder = Path(os.environ.get("EDGEFL_DEB_PACKAGES", BUILT))
    if "EDGEFL_DEB_PACKAGES" not in os.environ:
        command = ["make", "-C", ROOT, "deb", f"REVISION={revision}"]
        if is_emulated():
            command.append(f"ARCH={architecture()}")
        run_command(*command, timeout=LONGEST_S).check_returncode()
    (package,) = folder.glob(f"edgefl-agent_*-{revision}_{architecture()}.deb")
    return package


def architecture() -> str:
    """Return the architecture of packages and roots in Debian's words: EDGEFL_DEB_ARCH, or this machine's."""
    return os.environ.get("EDGEFL_DEB_ARCH", "") or _own_architecture()


def is_emulated() -> bool:
    """Return True if roots are of another architecture than this machine."""
    return architecture() != _own_architecture()


def _own_architecture() -> str:
    return run_command("dpkg", "--print-architecture", check=True).stdout.strip()


def base_root() -> Path:
    """Return a folder with a minimal Debian 12, which later calls find again: nothing may be written to it."""
    BUILT.mkdir(parents=True, exist_ok=True)
    folder = BUILT / f"bookworm-{architecture()}"
    with (BUILT / "bookworm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = BUILT / f"bookworm-{architecture()}.partial"
            shutil.rmtree(made, ignore_errors=True)
            ran = run_command(
                *("unshare", "--mount"),  # what it mounts ends with it, also if it is killed
                *("mmdebstrap", f"--architectures={architecture()}", "--variant=minbase"),
                *("--include=adduser,ca-certificates", "bookworm", made),
                "http://deb.debian.org/debian",
                timeout=LONGEST_S,
            )
            if ran.returncode:
                pytest.skip(f"Debian cannot be fetched: {ran.stderr[-300:]}")
            made.rename(folder)
    return folder


@contextmanager
def over(lower: object, folder: Path) -> Iterator[Path]:
    """A root that begins as ``lower``, a folder or several with colons, and writes below ``folder``."""
    for name in ("upper", "work", "root"):
        (folder / name).mkdir(parents=True)
    root = folder / "root"
    layers = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    run_command("mount", "-t", "overlay", "overlay", "-o", layers, root, timeout=60).check_returncode()
    try:
        run_command("mount", "-t", "proc", "proc", root / "proc", timeout=60).check_returncode()
        yield root
    finally:
        for mounted in (root / "proc", root):  # lazily: a process of a failed test may still be within
            run_command("umount", "--lazy", mounted, timeout=60)


def run_in(root: Path, *words: object, timeout: float = LONGEST_S) -> subprocess.CompletedProcess[str]:
    """Run a command in a root to its end."""
    environment = [
        "env",
        "-i",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND=noninteractive",
        "LC_ALL=C",
    ]
    return run_command("chroot", root, *environment, *words, timeout=timeout)


def within(root: Path, *words: object, timeout: float = LONGEST_S) -> subprocess.CompletedProcess[str]:
    """Run a command in a root; it has to succeed."""
    ran = run_in(root, *words, timeout=timeout)
    assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return ran


def pretend_systemd(root: Path) -> None:
    """Let maintainer scripts find a service manager: a ``systemctl`` that notes what it is asked."""
    (root / "run" / "systemd" / "system").mkdir(parents=True, exist_ok=True)
    program = root / "usr" / "bin" / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> /{SYSTEMCTL_LOG}\ncase "$*" in *is-enabled*) echo enabled ;; esac\nexit 0\n'
    )
    program.chmod(0o755)


def install(root: Path, package: Path) -> None:
    """Install a package and what it depends on, by apt."""
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    shutil.copy(package, root / "tmp" / package.name)
    within(root, "apt-get", "-o", "APT::Sandbox::User=root", "update", "-q")
    within(
        root,
        *("apt-get", "-o", "APT::Sandbox::User=root", "install", "-q", "-y", "--no-install-recommends"),
        f"/tmp/{package.name}",
    )


def read_unit(text: str) -> dict[str, dict[str, list[str]]]:
    """Return a unit's settings by section and name; a setting may come several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and line[0] not in "#;":
            name, _, value = line.partition("=")
            section.setdefault(name.strip(), []).append(value.strip())
    return sections


SANDBOX = """
mount --make-rprivate / && mount --rbind "$0" "$0" && mount --bind "$0/var/lib/edgefl-agent" "$0/var/lib/edgefl-agent" &&
mount -t tmpfs tmpfs "$0/tmp" && mount -o remount,bind,ro "$0" && exec chroot "$@"
"""
"""The mounts of ProtectSystem=strict, StateDirectory= and PrivateTmp=, in a mount namespace of their own."""
DENY_WRITE_EXECUTE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""PR_SET_MDWE, as MemoryDenyWriteExecute= sets it; from Linux 6.3 on."""


class Service:
    """The package's unit as a process: its command line, user and environment, its file system and the refusal of memory
    that is written and run, and a socket for its notifications.

    What else systemd's sandbox would add is missing: filters of system calls, no devices. An emulator compiles code, so an
    emulated agent may write and run memory.
    """

    def __init__(self, root: Path) -> None:
        unit = read_unit((root / UNIT).read_text())["Service"]
        (command,), (user,) = unit["ExecStart"], unit["User"]
        socket_folder = root / "run"
        self._inode = os.open(socket_folder, os.O_DIRECTORY)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = socket_folder / "notify"
        path.unlink(missing_ok=True)
        self._socket.bind(f"/proc/self/fd/{self._inode}/notify")  # whose path may be longer than a socket's
        path.chmod(0o777)
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        variables = [*unit.get("Environment", ()), "HOME=/var/lib/edgefl-agent", "NOTIFY_SOCKET=/run/notify"]
        variables += ["WATCHDOG_USEC=2000000", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        self.process = subprocess.Popen(
            [
                *(() if is_emulated() else (sys.executable, "-c", DENY_WRITE_EXECUTE)),
                *("unshare", "--mount", "sh", "-c", SANDBOX, root, f"--userspec={user}:{user}", root),
                *("env", "-i", *variables, *command.split()),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for target in (self._read_events, self._read_notes):
            threading.Thread(target=target, daemon=True).start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def _read_notes(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := self._socket.recv(4096):
                self.notes.put(data.decode())

    def wait_note(self, note: str) -> None:
        """Wait until the process has sent ``note`` to its manager."""
        self._wait(self.notes, lambda each: note in str(each).splitlines(), note)

    def wait_event(self, *names: str) -> dict[str, Any]:
        """Return the next event of one of these names."""
        found: dict[str, Any] = self._wait(self.events, lambda each: each["event"] in names, names)
        return found

    def _wait(self, source: queue.SimpleQueue[Any], fits: Any, wanted: object) -> Any:
        deadline, seen = time.monotonic() + PATIENCE_S, []
        while (left := deadline - time.monotonic()) > 0 and (
            self.process.poll() is None or not source.empty()
        ):
            try:
                found = source.get(timeout=min(left, 1))
            except queue.Empty:
                continue
            if fits(found):
                return found
            seen.append(found)
        ended = self.process.poll()
        errors = self.process.stderr.read() if ended is not None and self.process.stderr is not None else ""
        raise AssertionError(f"no {wanted}; there were {seen[-20:]}, exit code {ended} {errors}")

    def stop(self) -> int:
        """Stop it as systemd does; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._socket.shutdown(socket.SHUT_RD)
            self._socket.close()
            os.close(self._inode)


def configure(root: Path, **options: object) -> None:
    """Add options to the agent's configuration, as an administrator does."""
    file = root / "etc" / "edgefl" / "agent.toml"
    lines = [f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in options.items()]
    file.write_text("\n".join([file.read_text(), *lines, ""]))


def put_for_agent(root: Path, name: str, data: bytes) -> None:
    """Write a file into the agent's state folder that its user may read."""
    path = root / "var" / "lib" / "edgefl-agent" / name
    path.write_bytes(data)
    path.chmod(0o600)
    owner = path.parent.stat()
    os.chown(path, owner.st_uid, owner.st_gid)
