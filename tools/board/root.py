"""Debian root for arm64 with the packages of the agents, and commands in it under qemu-user.

Commands run in private namespaces (:mod:`tools.board.__main__`), so the kernel removes all mounts at their end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ARCHITECTURE, MACHINE = "arm64", "aarch64"
SUITE = "bookworm"
PYTHON = "3.11"
"""Python of the suite: wheels are chosen for it."""
PACKAGES = (
    *(
        "base-files",
        "base-passwd",
        "bash",
        "coreutils",
        "dash",
        "libc-bin",
        "ca-certificates",
        "python3",
        "python3-venv",
    ),
    # Libraries that the C++ agent is linked to, or loads.
    *(
        "libmosquitto1",
        "libsqlite3-0",
        "libssl3",
        "libzstd1",
        "zlib1g",
        "libcurl4",
        "libpng16-16",
        "libjpeg62-turbo",
    ),
    *("libstdc++6", "libgomp1", "libatomic1"),
)
PINNED = ("numpy", "onnxruntime", "pillow", "numba")
"""Packages of the release that this machine has: results are compared between the two."""
MORE = ("numba",)
"""Package that the server's sums need beside a device's packages."""
EXTRAS = ("device", "images")
"""Extras of edgefl that the root gets."""
CLONE = Path(__file__).resolve().parents[2]
BOARD = CLONE / "build" / "board"
"""Folder of what is kept between runs."""
PLATFORMS = (
    f"manylinux2014_{MACHINE}",
    *(f"manylinux_2_{minor}_{MACHINE}" for minor in (17, 24, 26, 27, 28, 31, 34, 35, 36)),
)
"""Platform tags of wheels that glibc 2.36, the suite's, can load."""
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "qemu-aarch64-static": "qemu-user-static",
    "unshare": "util-linux",
    "mosquitto": "mosquitto",
}
"""Programs that the board needs here, with Debian's packages."""
BINFMT = Path("/proc/sys/fs/binfmt_misc")
ENTRY = f"edgefl-board-{MACHINE}"
ELF = bytes.fromhex("7f454c460201010000000000000000000200b700")
"""Begin of a program for arm64: 64 bits, little-endian, executable, machine 183."""
ELF_MASK = bytes.fromhex("ffffffffffffff00fffffffffffffffffeffffff")
PROCESSOR = "cortex-a72"
"""Processor that qemu emulates, of a Raspberry Pi 4. Runtimes read the same from /proc/cpuinfo and /sys."""
CPUINFO = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3
"""
DEVICES = ("null", "zero", "random", "urandom")
LAYOUT = 1
"""Number of this module's way to make a root: another one does not use a cached root."""
_MOST_LINES = 20
_SETUPTOOLS = 77
_LOG = logging.getLogger(__name__)


class BoardError(Exception):
    """Failure of a stage, in words for a person."""


def run(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a command and return its standard output.

    Raises:
        BoardError: The command failed; with its last lines.
    """
    done = subprocess.run(
        [str(word) for word in command], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_MOST_LINES:]
        raise BoardError(
            "\n".join([f"{' '.join(map(str, command))[:300]}: exit code {done.returncode}", *lines])
        )
    return done.stdout


def check_machine() -> None:
    """Raise BoardError if the board cannot run here, with all reasons."""
    reasons = [f"expected {program}, found none; do: apt-get install {package}" for program, package in PROGRAMS.items()
               if find_program(program) is None]  # fmt: skip
    if os.geteuid() != 0:
        reasons.insert(
            0,
            "expected root (it mounts and enters the board's file system), found another user; do: sudo make board",
        )
    if not BINFMT.parent.is_dir():
        reasons.append(f"expected Linux with binfmt_misc at {BINFMT}, found none; do: modprobe binfmt_misc")
    if reasons:
        raise BoardError("\n".join(reasons))


def find_program(name: str) -> str | None:
    """Return the path of a program, also of one in the folders of administrators."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")


def elf_machine(program: Path) -> int:
    """Return the machine of an ELF file: 183 is AArch64, 62 x86-64; 0 if it is no ELF file."""
    head = program.open("rb").read(20)
    return int.from_bytes(head[18:20], "little") if head[:4] == ELF[:4] else 0


def mirror() -> str:
    """Return the address of Debian's packages in this machine's own sources, or an empty string."""
    wanted = "$(REPO_URI) $(ORIGIN) $(CODENAME) $(COMPONENT) $(LABEL)"
    done = subprocess.run(["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return next((row[0] for row in rows if row[1:] == ["Debian", SUITE, "main", "Debian"]), "")


@dataclass(frozen=True)
class BoardRoot:
    """Root folder of the board.

    Attributes:
        folder: The root.
        shared: Folder of this machine that the board sees under the same path.
    """

    folder: Path
    shared: Path

    PYTHON = "/opt/edgefl/bin/python"

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs ``words`` in the root, with an environment of its own."""
        variables = (
            "PATH=/opt/edgefl/bin:/usr/bin",
            "HOME=/root",
            "LC_ALL=C.UTF-8",
            "OMP_NUM_THREADS=1",
            f"QEMU_CPU={PROCESSOR}",
        )
        chroot = find_program("chroot") or "chroot"
        return ["/usr/bin/env", "-i", *variables, chroot, str(self.folder), *map(str, words)]

    def run(self, *words: str | Path) -> str:
        """Run a command in the root and return its standard output. Raises BoardError if it fails."""
        return run(self.command(*words))

    def mount(self) -> None:
        """Mount what programs in the root need. Call it in a private mount namespace.

        Of ``/sys`` only two files about processors exist: onnxruntime crashes on those of this machine, and ExecuTorch
        does not start without any.
        """
        run(["mount", "-t", "proc", "proc", self.folder / "proc"])
        described = self.folder / "etc" / "cpuinfo"
        described.write_text(CPUINFO)
        run(["mount", "--bind", described, self.folder / "proc" / "cpuinfo"])
        processors = self.folder / "sys/devices/system/cpu"
        processors.mkdir(parents=True, exist_ok=True)
        for name in ("possible", "present"):
            (processors / name).write_text("0\n")
        for name in DEVICES:
            (self.folder / "dev" / name).touch()
            run(["mount", "--bind", f"/dev/{name}", self.folder / "dev" / name])
        inside = self.folder / self.shared.relative_to("/")
        inside.mkdir(parents=True, exist_ok=True)
        run(["mount", "--bind", self.shared, inside])


@contextmanager
def only_run() -> Iterator[None]:
    """Hold the lock of the emulated board and its entry of binfmt_misc. Raises BoardError if another run holds it."""
    BOARD.mkdir(parents=True, exist_ok=True)
    with (BOARD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BoardError(
                f"expected one run with an emulated board, found another that uses {BOARD}; wait for it, or stop it"
            ) from None
        yield


def register_emulator() -> bool:
    """Have the kernel start qemu for programs of arm64. Return True if the entry is ours.

    The kernel opens qemu now (flag F), so the root needs no copy of it. :func:`unregister_emulator` removes the entry.
    """
    if not (BINFMT / "register").exists():
        run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT])
    if (BINFMT / ENTRY).exists():  # of a run that was killed
        unregister_emulator()
    for entry in BINFMT.iterdir():
        if entry.name not in ("register", "status") and _runs_arm64(entry.read_text()):
            return False
    magic, mask = ("".join(f"\\x{byte:02x}" for byte in each) for each in (ELF, ELF_MASK))
    (BINFMT / "register").write_text(f":{ENTRY}:M::{magic}:{mask}:{find_program('qemu-aarch64-static')}:OCF")
    return True


def _runs_arm64(entry: str) -> bool:
    lines = entry.splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags:")), "")
    return "enabled" in lines and "F" in flags and f"magic {ELF.hex()}" in lines


def unregister_emulator() -> None:
    """Remove our entry, if there is one."""
    entry = BINFMT / ENTRY
    if not entry.exists() and not (BINFMT / "register").exists():
        with tempfile.TemporaryDirectory() as folder:  # the run mounted it for itself alone
            run(["mount", "-t", "binfmt_misc", "binfmt_misc", folder])
            try:
                if Path(folder, ENTRY).exists():
                    Path(folder, ENTRY).write_text("-1")
            finally:
                run(["umount", folder])
    elif entry.exists():
        entry.write_text("-1")


def requirements() -> list[str]:
    """Return the packages with release that the root gets beside edgefl's own wheel."""
    return [f"{name}=={version(name)}" for name in PINNED]


def open_root(board: Path, folder: Path) -> tuple[BoardRoot, bool]:
    """Return the mounted root in ``folder`` with all packages but edgefl's, and whether it was cached.

    Args:
        board: Folder of the board's files in the clone, such as the cached root: one file, because the build of a wheel
            looks into every folder of the clone.
        folder: New folder of the root, outside of the clone.

    Raises:
        BoardError: A package cannot be had.
    """
    root = BoardRoot(folder, board / "shared")
    root.shared.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]
    needs = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    key = json.dumps([LAYOUT, SUITE, PACKAGES, requirements(), MORE, executorch(), needs])
    cache = board / f"root-{hashlib.sha256(key.encode()).hexdigest()[:12]}.tar"
    if cache.exists():
        folder.mkdir()
        run(["tar", "--extract", "--file", cache, "--directory", folder])
        root.mount()
        return root, True
    for old in board.glob("root-*"):
        old.unlink()
    _unpack(folder)
    root.mount()
    _install(root)
    unfinished = cache.with_suffix(".unfinished")
    mounted = [f"--exclude=.{place}/*" for place in ("/proc", "/dev", root.shared)]
    run(["tar", "--create", "--file", unfinished, "--directory", folder, *mounted, "."])
    unfinished.rename(cache)
    return root, False


def executorch() -> str:
    """Return the requirement of the ExecuTorch release that this machine has."""
    return f"executorch=={version('executorch').partition('+')[0]}"


def _unpack(folder: Path) -> None:
    """Unpack Debian's packages into ``folder``. No script of theirs runs, so this takes seconds and no emulation."""
    _LOG.info("  unpack Debian's packages for arm64 (20 s)")
    command = ["mmdebstrap", f"--architectures={ARCHITECTURE}", "--variant=extract", "--mode=root", "--quiet"]
    command += [
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        f"--include={','.join(PACKAGES)}",
        SUITE,
        str(folder),
    ]
    run([*command, *([mirror()] if mirror() else [])])
    for name in ("passwd", "group"):
        shutil.copy(folder / "usr/share/base-passwd" / f"{name}.master", folder / "etc" / name)
    (folder / "etc/hosts").write_text("127.0.0.1 localhost\n")
    for needed in (
        "etc/resolv.conf",
        "etc/ssl/certs/ca-certificates.crt",
    ):  # for programs that somebody runs in it
        if Path("/", needed).exists():
            (folder / needed).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/", needed), folder / needed)


def _install(root: BoardRoot) -> None:
    """Download wheels for arm64 here, with this user's settings of pip, and have the root's own pip install them."""
    wheels = root.shared / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheel = build_wheels(root.shared / "edgefl")[0]
    _LOG.info("  download wheels for arm64 (30 s)")
    choice = [word for tag in PLATFORMS for word in ("--platform", tag)]
    choice += ["--python-version", PYTHON, "--only-binary=:all:", "--quiet", "--dest", str(wheels)]
    pip = [sys.executable, "-m", "pip", "download", *choice]
    run([*pip, f"{wheel}[{','.join(EXTRAS)}]", *requirements(), *MORE])
    run([*pip, "--no-deps", executorch()])
    _LOG.info("  install them by the board's pip, emulated (30 s)")
    root.run("/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/edgefl")
    install = [*pip_in(root), "--find-links", str(wheels)]
    root.run(*install, f"{wheel}[{','.join(EXTRAS)}]", *requirements(), *MORE)
    root.run(*install, "--no-deps", executorch())


def pip_in(root: BoardRoot) -> list[str]:
    """Return the begin of a command that installs wheels in the root, with the pip of Debian."""
    [pip] = sorted((root.folder / "usr/share/python-wheels").glob("pip-*.whl"))
    inside = Path("/") / pip.relative_to(root.folder)
    return [root.PYTHON, f"{inside}/pip", "install", "--quiet", "--no-compile", "--no-index"]


def build_wheels(into: Path) -> list[Path]:
    """Build the wheels of edgefl and of the conformance kit from this clone, edgefl's first."""
    shutil.rmtree(into, ignore_errors=True)
    # With the setuptools that is here if it is new enough: an environment for each build takes longer than the build.
    recent = int(version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    for source in (CLONE, CLONE / "conformance"):
        run(
            [
                sys.executable,
                "-m",
                "build",
                "--quiet",
                *["--no-isolation"] * recent,
                "--outdir",
                into,
                source,
            ],
            cwd=CLONE,
        )
    return sorted(into.glob("*.whl"), key=lambda path: "conformance" in path.name)
