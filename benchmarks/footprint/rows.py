"""Cost of a device's process before it trains: memory while it waits, time until it is ready, packages on disk.

Beside Flower with torch. Processes are real ones, on a real broker or server; sizes are those of the installed packages.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.machine import family, quiet_environment, resident_bytes
from benchmarks.footprint import installed as footprint_installed
from benchmarks.footprint.idle import (
    HOST,
    Idle,
    agents,
    device_command,
    flower_clients,
)
from benchmarks.footprint.idle import (
    PATIENCE_S as BROKER_S,
)
from benchmarks.memory.rows import SAMPLES_PER_DEVICE
from edgefl.config import Federation, parse
from edgefl.config.text import dump
from edgefl.errors import ConfigError, EdgeflError
from edgefl.lab import agents as lab_agents
from edgefl.lab.broker import lab_broker
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.system.distribution import PACKAGES, folders
from edgefl.system.processes import child_process, last_line
from edgefl.system.python import module_command
from edgefl.wire.keys import KeyPair

CPP = "agent-cpp"

DEVICE = (
    "numpy",
    "onnxruntime",
    "cryptography",
    "paho-mqtt",
    "msgspec",
    "safetensors",
    "backports.zstd",
    "typer",
    "rich",
)
"""What ``pip install edgefl-tiers`` asks for: `pyproject.toml`'s dependencies."""


class FootprintRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of client. What could not be measured is None, and ``error`` says why.

    ``idle_rss_bytes``: resident memory when connected and waiting, ``idle_anonymous_bytes`` the part that is no file's
    contents and that no other process shares; ``ready_s``: from process start until the other side knows it; medians of
    ``repeat`` fresh processes. ``installed_bytes``: its packages and all that they require, as they were shipped, and edgefl
    itself; ``bytecode_bytes``: what Python compiled beside them, which `pip install --no-compile` leaves out.
    ``as_pip_installs_bytes``: of the same packages with everything they ask for. ``packages``: name -> [version, bytes].
    ``training_peak_bytes``: the most resident memory in a round of ResNet-20's weak tier
    (:mod:`benchmarks.footprint.rows`). Of the C++ agent, what is installed are its binary and the libraries that it
    loads beside the system's, without symbols.
    """

    what: str
    idle_rss_bytes: int | None
    ready_s: float | None
    installed_bytes: int | None
    idle_anonymous_bytes: int | None
    ready_min_s: float | None
    bytecode_bytes: int | None
    as_pip_installs_bytes: int | None
    training_peak_bytes: int | None = None
    repeat: int
    error: str
    packages: dict[str, tuple[str, int]]


@dataclass(frozen=True)
class ClientKind:
    """A kind of client. Package names as :mod:`benchmarks.footprint.installed` reads them."""

    what: str
    clients: Callable[[str, int], Iterator[Idle]]
    packages: tuple[str, ...]
    as_pip_installs: tuple[str, ...] = ()
    ours: bool = True
    engine: str = ""


# A device needs executorch's libraries, and of what the package requires (coremltools, pandas, torchao, ...) nothing.
_WITHOUT_ONNX = tuple(name for name in DEVICE if name != "onnxruntime")
KINDS = (
    ClientKind(
        "edgefl-onnx",
        lambda python, repeat: agents(device_command(python), "onnx", repeat),
        DEVICE,
        engine="onnx",
    ),
    ClientKind(
        "edgefl-executorch",
        lambda python, repeat: agents(device_command(python), "executorch", repeat),
        (*_WITHOUT_ONNX, "executorch!"),
        (*DEVICE, "executorch"),
        engine="executorch",
    ),
    ClientKind("flower-torch", flower_clients, ("flwr", "torch"), ours=False),
)


def measure(
    repeat: int = 5,
    python: str = sys.executable,
    flower: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> list[FootprintRow]:
    """A row for each of KINDS. ``python`` and ``flower`` are interpreters of the environments that are measured; without
    ``flower`` its row says how to get one."""
    rows = []
    for kind in KINDS:
        say(f"{kind.what}: {repeat} processes, one after the other")
        rows.append(_row(kind, python if kind.ours else flower, repeat))
    try:
        (agent,) = lab_agents.command_of(lab_agents.CPP)
    except ConfigError as error:
        say(f"{CPP} is left out: {error.message}")
        return rows
    say(f"{CPP}: {repeat} processes of {agent}, one after the other")
    return [*rows, _cpp_row(Path(agent), repeat)]


def _cpp_row(agent: Path, repeat: int) -> FootprintRow:
    """The C++ agent on ExecuTorch."""
    problems, runs, peak = [], list[Idle](), None
    files: Mapping[str, int] = {}
    try:
        files = sizes(agent)
        runs = list(agents([str(agent)], "executorch", repeat))
        peak = training_peak([str(agent)], "executorch")
    except EdgeflError as error:
        problems.append(error.message)
    return FootprintRow(
        what=CPP,
        **_medians(runs),
        installed_bytes=sum(files.values()) or None,
        bytecode_bytes=0 if files else None,
        as_pip_installs_bytes=None,
        training_peak_bytes=peak,
        repeat=repeat,
        error="; ".join(problems),
        packages={name: ("", count) for name, count in sorted(files.items())},
    )


def _row(kind: ClientKind, python: str, repeat: int) -> FootprintRow:
    problems = []
    runs: list[Idle] = []
    peak: int | None = None
    packages: footprint_installed.Found = {}
    whole: footprint_installed.Found = {}
    try:
        if not python:
            raise EdgeflError(
                "no interpreter was named; `python -m benchmarks peer flower-torch` makes an environment"
            )
        packages = installed(python, kind.packages)
        whole = installed(python, kind.as_pip_installs or kind.packages)
    except EdgeflError as error:
        problems.append(error.message)
    try:
        runs = list(kind.clients(python, repeat)) if python else []
        peak = training_peak(device_command(python), kind.engine) if kind.engine else None
    except EdgeflError as error:
        problems.append(error.message)
    own = own_bytes() if kind.ours else 0
    return FootprintRow(
        what=kind.what,
        **_medians(runs),
        installed_bytes=_sum(packages, "bytes", own),
        bytecode_bytes=_sum(packages, "bytecode_bytes", 0),
        as_pip_installs_bytes=_sum(whole, "bytes", own),
        training_peak_bytes=peak,
        repeat=repeat,
        error="; ".join(problems),
        packages={
            name: (str(size["version"]), int(str(size["bytes"]))) for name, size in sorted(packages.items())
        },
    )


def _medians(runs: Sequence[Idle]) -> dict[str, Any]:
    """Return the fields of a row that describe its processes."""
    return {
        "idle_rss_bytes": _median([run.idle_rss_bytes for run in runs]),
        "idle_anonymous_bytes": _median([run.idle_anonymous_bytes for run in runs]),
        "ready_s": round(statistics.median([run.ready_s for run in runs]), 3) if runs else None,
        "ready_min_s": round(min(run.ready_s for run in runs), 3) if runs else None,
    }


def _median(values: Sequence[int]) -> int | None:
    return int(statistics.median(values)) if values else None


def _sum(found: footprint_installed.Found, key: str, more: int) -> int | None:
    return sum(int(str(size[key])) for size in found.values()) + more if found else None


def installed(python: str, names: Sequence[str]) -> footprint_installed.Found:
    """Sizes in the environment of ``python``; EdgeflError if one of ``names`` is not installed there."""
    script = Path(footprint_installed.__file__)
    # Isolated: a folder of sources must not stand in for a package.
    done = subprocess.run(
        [python, "-I", str(script), *names], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise EdgeflError(
            f"sizes of {', '.join(names)}: {last_line(done.stderr, 'no answer')}; install what is missing, "
            "or give another environment's interpreter"
        )
    sizes: footprint_installed.Found = json.loads(done.stdout)
    return sizes


def own_bytes() -> int:
    """Our own packages on disk: what is installed with a device, the server's part included."""
    files = [file for folder in folders(*PACKAGES) for file in folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file() and "__pycache__" not in file.parts)


_SYSTEM = re.compile(r"^(ld-linux.*|linux-vdso|libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.")
"""What every system has that runs a C++ program at all."""
_RUNTIME = "libexecutorch.so"
_OPENED = ("libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so")
"""What the engine opens beside its runtime when it starts: nothing names it in the binary."""
_LOADED = re.compile(r"^\s*(\S+) => (/\S+) \(", re.MULTILINE)


def sizes(agent: Path) -> Mapping[str, int]:
    """Bytes of the agent and of each library that it loads beside the system's, without their symbols. EdgeflError where it
    cannot be looked at."""
    found = {agent.name: _stripped(agent)}
    libraries = {name: Path(path) for name, path in _LOADED.findall(_answer(["ldd", str(agent)]))}
    if runtime := libraries.get(_RUNTIME):
        libraries |= {name: runtime.with_name(name) for name in _OPENED if runtime.with_name(name).exists()}
    for name, path in libraries.items():
        if not _SYSTEM.match(name):
            found[name] = _stripped(path.resolve())
    return found


def _stripped(file: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        copy = Path(folder) / file.name
        _answer(["strip", "--strip-unneeded", "-o", str(copy), str(file)])
        return copy.stat().st_size


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise EdgeflError(
            f"{command[0]} cannot be run: {error.strerror or error}; install binutils"
        ) from error
    if done.returncode:
        raise EdgeflError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout


MODEL, TIER, BATCH, STEPS = "resnet20", "weak", 32, 10
PATIENCE_S = 600.0
_EVERY_S = 0.02


def training_peak(agent: Sequence[str], engine: str) -> int:
    """Bytes of resident memory of the agent and its children, the most of a whole round, looked at every 20 ms.

    ``agent``: a command that takes the options of `edgefl device`. EdgeflError if the round does not end.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        port = stack.enter_context(lab_broker(folder, BROKER_S))
        federation = _federation(engine, port)
        dataset = open_data(federation)
        dataset.write_device(folder / "data.npz", partition(federation, dataset, 1)[0])
        (folder / "federation.toml").write_text(dump(federation))
        server = module_command("edgefl", "server", "--config", str(folder / "federation.toml"))
        server += ["--out", str(folder / "run"), "--sign-key", str(folder / "key")]
        options = ["--id", f"{TIER}-0", "--federation", federation.federation.name, "--until-done"]
        options += ["--broker", f"{HOST}:{port}", "--data", str(folder / "data.npz"), "--engine", engine]
        options += ["--store", str(folder / "store"), "--server-key", KeyPair(folder / "key").public_key]
        environment = os.environ | quiet_environment()
        log = stack.enter_context((folder / "log").open("wb"))
        serving, training = (
            stack.enter_context(child_process(command, stdout=log, stderr=log, env=environment))
            for command in (server, [*agent, *options])
        )
        return _watched(serving, training, folder / "log")


def _federation(engine: str, port: int) -> Federation:
    tables = {
        "federation": {"name": "bench-footprint", "rounds": 1},
        "model": {"name": MODEL},
        "algorithm": {"steps": STEPS, "batch": BATCH},
        "data": {"name": "random", "partition": "iid", "train_samples": SAMPLES_PER_DEVICE},
        "round": {"evaluate_every": 0},
        "broker": {"kind": "external", "host": HOST, "port": port},
    }
    federation = completed(parse(tables, source="the benchmark"), per_tier=1)
    tier = federation.tiers[TIER].model_copy(update={"engine": engine})
    alone = federation.round.model_copy(update={"min_devices": 1})
    return federation.model_copy(update={"tiers": {TIER: tier}, "round": alone})


def _watched(server: subprocess.Popen[bytes], agent: subprocess.Popen[bytes], log: Path) -> int:
    """The agent's peak until the server is done."""
    peak, deadline = 0, time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        if agent.poll() not in (None, 0):
            break
        peak = max(peak, resident_bytes(family(agent.pid)))
        time.sleep(_EVERY_S)
    if server.poll() != 0:
        words = last_line(log.read_text(errors="replace"), "no word")
        raise EdgeflError(f"the round in which the agent trains did not end: {words}")
    return peak
