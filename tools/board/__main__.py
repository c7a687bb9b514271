"""Command of `make board`: run both agents on an emulated arm64 board against a server on this machine.

The work is done by a second process of this command in private namespaces of mounts and processes. When it ends, the
kernel removes its mounts and kills what it started, also after SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.board.root import (
    BOARD,
    CLONE,
    BoardError,
    BoardRoot,
    build_wheels,
    check_machine,
    elf_machine,
    only_run,
    open_root,
    pip_in,
    register_emulator,
    unregister_emulator,
)

CPP = CLONE / "build" / "agents" / "cpp-arm64"
INSIDE = "EDGEFL_BOARD_INSIDE"
"""Variable of the process inside: the folder of this run's root."""
STAGES = ("rounds", "kit", "equality")
AGENTS = ("python", "cpp")
AARCH64 = 183
"""Number of the processor in ELF files."""
KIT: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cpp", "onnx", ()),
    ("cpp", "executorch", ()),
    ("python", "executorch", ("rounds", "algorithms")),
    ("python", "onnx", ()),
)
"""Agent, engine and groups of cases; none: all. Python's agent starts slowly: cases that no engine changes run once."""
_LOG = logging.getLogger("tools.board")


class SecondsFormatter(logging.Formatter):
    """Formatter of log lines that begin with the seconds since the start."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.relativeCreated / 1000:6.0f} s  {record.getMessage()}"


@contextmanager
def stage(text: str, stages: list[dict[str, Any]]) -> Iterator[None]:
    """Log the begin and the end of a stage, and append its times to ``stages``."""
    begun, before = time.monotonic(), _processor_s()
    _LOG.info(text)
    yield
    took, used = time.monotonic() - begun, _processor_s() - before
    stages.append({"stage": text, "seconds": round(took, 1), "processor_seconds": round(used, 1)})
    _LOG.info(f"  done in {took:.0f} s ({used:.0f} s of processor time)")


def _processor_s() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stages. Raises BoardError if one fails."""
    stages = list[dict[str, Any]]()
    summary: dict[str, Any] = {"stages": stages}
    ours = register_emulator()
    try:
        with stage("root: Debian arm64 with a device's packages (from build/board if it is there)", stages):
            root, cached = open_root(BOARD, Path(os.environ[INSIDE]) / "root")
        with stage("agents: wheels of this clone, binding of ExecuTorch, programs", stages):
            agents = _install_agents(root, options.agents)
        summary |= {"root_cached": cached, "uname": root.run("uname", "-m").strip()}
        summary["elf_machines"] = _check_machines(root, agents, summary["uname"])
        folder = root.shared / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if "rounds" in options.stages:
            from tools.board.federation import board_devices, train

            with stage(
                "rounds: agents on the board, a server here, over TLS; each device is killed once", stages
            ):
                summary["federation"] = train(root, folder / "rounds", board_devices(agents))
        if "kit" in options.stages:
            summary["kit"] = {}
            for agent, engine, groups in KIT:
                if agent in agents:
                    only = options.only or groups
                    with stage(f"kit: {agent} on {engine}, {' '.join(only) or 'all cases'}", stages):
                        place = folder / f"kit-{agent}-{engine}"
                        summary["kit"][place.name] = _play(root, place, agents[agent], engine, only, options)
        if "equality" in options.stages:
            from tools.board.equality import compare_values

            with stage("equality: values of the board beside those of this machine", stages):
                summary["equality"] = compare_values(root, folder / "equality")
    finally:
        if ours:
            unregister_emulator()
    return summary


def _install_agents(root: BoardRoot, kinds: Sequence[str]) -> dict[str, list[str]]:
    """Install this clone's wheels and programs in the root. Return the command of each agent."""
    wheels = build_wheels(root.shared / "edgefl")
    root.run(*pip_in(root), "--no-deps", "--force-reinstall", *wheels)
    _compile_binding(root)
    commands = {"python": ["edgefl", "device", "--no-tune"]}
    if "cpp" in kinds:
        commands["cpp"] = _install_cpp(root)
    return {kind: command for kind, command in commands.items() if kind in kinds}


def _install_cpp(root: BoardRoot) -> list[str]:
    """Copy the cross-compiled agent into the root, with links to the runtimes of the root's wheels. Return its command."""
    program, folder = CPP / "edgefl-agent", root.folder / "opt/agent"
    if not program.exists():
        raise BoardError(f"expected {program}, found none; do: make agents-cpp ARCH=arm64")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    shutil.copy(program, folder)
    packages = root.folder / "opt/edgefl/lib/python3.11/site-packages"
    for library in (
        *packages.glob("executorch/lib/*.so"),
        *packages.glob("onnxruntime/capi/libonnxruntime.so.*"),
    ):
        name = "libonnxruntime.so.1" if "onnxruntime" in library.name else library.name
        (folder / "lib" / name).symlink_to(Path("/") / library.relative_to(root.folder))
    return ["env", "LD_LIBRARY_PATH=/opt/agent/lib", "/opt/agent/edgefl-agent"]


def _compile_binding(root: BoardRoot) -> None:
    """Compile the binding of ExecuTorch for the board here and put it where the agent looks."""
    from edgefl_device.engine.executorch.build import ExecuTorchWheel, build

    compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None:
        raise BoardError(f"expected {compiler}, found none; do: apt-get install crossbuild-essential-arm64")
    find = (
        "from edgefl_device.engine.executorch import build as b; wheel = b.find_wheel();"
        "print(wheel.root, wheel.version, b._SOURCE.parent / b._file_name(wheel))"
    )
    place, release, target = root.run(root.PYTHON, "-c", find).split()
    os.environ["CXX"] = compiler
    try:
        made = build(ExecuTorchWheel(root.folder / place[1:], release), BOARD / "binding")
    finally:
        del os.environ["CXX"]
    shutil.copy(made, root.folder / target[1:])


def _check_machines(root: BoardRoot, agents: dict[str, list[str]], uname: str) -> dict[str, int]:
    """Return the ELF machine of both agents' programs. Raises BoardError unless they and the root's kernel are of arm64."""
    programs = {"python": "usr/bin/python3.11", "cpp": "opt/agent/edgefl-agent"}
    found = {kind: elf_machine(root.folder / programs[kind]) for kind in agents}
    if uname != "aarch64" or set(found.values()) != {AARCH64}:
        raise BoardError(f"expected aarch64 and ELF machine {AARCH64}, found {uname} and {found}")
    return found


def _play(
    root: BoardRoot,
    folder: Path,
    agent: Sequence[str],
    engine: str,
    only: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Play the conformance kit against an agent on the board.

    Failed cases are played once more, one at a time and with twice the patience: under emulation on a busy machine an
    agent may be too slow for a wait.

    Returns:
        Numbers of passed, missing (optional) and skipped cases, and names of those that passed the second time.

    Raises:
        BoardError: A case failed twice.
    """
    command = [sys.executable, "-m", "edgefl_conformance", "run", "--json", "--engine", engine]
    cases = dict[str, dict[str, Any]]()
    again: list[str] = []
    for attempt, (jobs, patience) in enumerate(((options.jobs, options.patience), (1, 2 * options.patience))):
        words = ["--jobs", str(jobs), "--patience", str(patience), "--out", f"{folder}-{attempt}"]
        words += [word for name in again or only for word in ("--only", name)]
        done = subprocess.run(
            [*command, *words, "--", *root.command(*agent)], capture_output=True, text=True, check=False
        )
        try:
            cases |= {each["case"]: each for each in json.loads(done.stdout)["cases"]}
        except ValueError:
            raise BoardError(
                f"the kit ended with exit code {done.returncode}: {done.stderr[-2000:]}"
            ) from None
        failed = [each for each in cases.values() if each["outcome"] == "failed"]
        if not failed:
            break
        again = [each["case"] for each in failed]
        _LOG.info(f"  failed: {', '.join(again)}" + ", played once more" * (attempt == 0))
    else:
        lines = (f"{each['case']}: expected {each['expected']}, found {each['found']}" for each in failed)
        raise BoardError("\n".join(["cases of the kit that failed twice:", *lines]))
    outcomes = [each["outcome"] for each in cases.values()]
    counts = {name: outcomes.count(name) for name in ("passed", "missing", "skipped")}
    _LOG.info("  " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return {**counts, "second_time": again}


def isolate(arguments: Sequence[str]) -> int:
    """Run this command in private namespaces and return its exit code. A signal ends it with all that it started."""
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        sys.executable,
        "-m",
        "tools.board",
    ]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with only_run(), tempfile.TemporaryDirectory(prefix="edgefl-board-", dir="/var/tmp") as folder:
        environment = {**os.environ, INSIDE: folder}
        process = subprocess.Popen([*command, *arguments], cwd=CLONE, env=environment, start_new_session=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            print("interrupted: all processes on the board are ended", file=sys.stderr)
            return 130
        finally:
            process.kill()  # unshare's child dies with it, and the kernel ends what that started
            process.wait()
            unregister_emulator()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="make board", description="Both agents on an emulated arm64 board.")
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=STAGES, help="stages to run; default: all"
    )
    parser.add_argument(
        "--agents", nargs="+", choices=AGENTS, default=AGENTS, help="agents to run; default: both"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="cases or groups of the conformance kit; default: all"
    )
    parser.add_argument("--jobs", type=int, default=4, help="agents of the kit that run at a time (4)")
    parser.add_argument(
        "--patience", type=float, default=2.0, help="times that waits of the kit are longer (2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object about the run")
    options = parser.parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(SecondsFormatter())
    logging.getLogger("tools.board").addHandler(handler)
    logging.getLogger("tools.board").setLevel(logging.INFO)
    try:
        if INSIDE not in os.environ:
            check_machine()
            return isolate(sys.argv[1:])
        summary = work(options)
    except BoardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
