"""``python -m benchmarks footprint``: memory, start time and installed size of idle clients, beside Flower with torch.

Processes are real ones, on a real broker or server; sizes come from the installed packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import psutil
import typer

from benchmarks.machine import family, import_path, quiet_environment, resident_bytes
from benchmarks.memory import SAMPLES_PER_DEVICE
from benchmarks.options import Json, python_option
from benchmarks.peers import interpreter, peers
from benchmarks.results import report
from benchmarks.workers import installed as installed_worker
from edgefl.api.progress import reporting
from edgefl.cli.output import errors
from edgefl.config import Federation, parse
from edgefl.config.text import dump
from edgefl.errors import ConfigError, EdgeflError
from edgefl.lab import agents as lab_agents
from edgefl.lab.broker import free_port, lab_broker, listens
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.system.distribution import PACKAGES, folders
from edgefl.system.processes import child_process, end_process, last_line, module_command
from edgefl.system.sizes import size
from edgefl.wire.keys import KeyPair
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Connected, Event, IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics

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
"""Requirements of ``pip install edgefl-tiers``: `pyproject.toml`'s dependencies."""
HOST, FEDERATION, SAMPLES = "127.0.0.1", "bench-footprint", 32
MODEL, TIER, BATCH, STEPS = "resnet20", "weak", 32, 10
READY_S = 60.0
SETTLE_S = 5.0
"""Time after which a connected client is idle."""
TRAINING_S = 600.0
_EVERY_S = 0.02


class FootprintRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of client; medians of ``repeat`` fresh processes. A field is None if its measurement failed.

    Attributes:
        idle_rss_bytes: resident memory when connected and waiting.
        idle_anonymous_bytes: the part of it that is neither a file's contents nor shared with another process.
        idle_pss_bytes: the part of it in proportion: each page divided by the number of processes that map it.
        ready_s: from the start of the process until the other side has received its first message.
        installed_bytes: the client's packages with their requirements as shipped, and edgefl. For the C++ agent: its binary
            and the libraries that it loads beside the system's, without symbols.
        bytecode_bytes: Python's compiled files, which `pip install --no-compile` leaves out.
        as_pip_installs_bytes: the packages with all requirements that pip installs.
        training_peak_bytes: highest resident memory in a round of ResNet-20's weak tier.
        error: reasons of failed measurements.
        packages: (version, bytes) by name.
    """

    what: str
    idle_rss_bytes: int | None
    ready_s: float | None
    installed_bytes: int | None
    idle_anonymous_bytes: int | None
    idle_pss_bytes: int | None
    ready_min_s: float | None
    bytecode_bytes: int | None
    as_pip_installs_bytes: int | None
    training_peak_bytes: int | None = None
    repeat: int
    error: str
    packages: dict[str, tuple[str, int]]


def footprint(
    repeat: Annotated[int, typer.Option(min=1, help="fresh processes of each kind")] = 5,
    python: Annotated[str, python_option("interpreter of a device's environment; default: this one")] = "",
    flower: Annotated[
        str,
        python_option(
            "interpreter of an environment with flwr and torch; default: the one of `python -m benchmarks peer`"
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure an idle device and a Flower client with torch: memory, start time and installed size.

    Real processes on a real broker (Mosquitto where it is installed), one after the other: resident memory when connected
    and waiting, and seconds from the start of the process until the other side has received its first message. Installed is
    the size on disk of its packages and their requirements as shipped. The device of --engine executorch needs that
    package's libraries and none of its requirements (pip install --no-deps executorch); --json has the size with all of
    them, too, and the bytecode that Python adds. Training is the peak of a round of ResNet-20's weak tier.

    The C++ agent has a row where there is one: EDGEFL_AGENT_CPP names it, or it lies in the path or in build/agents/cpp. Its
    size is the sum of the stripped binary and the libraries that it loads.

    Examples:

      python -m benchmarks footprint --json

      python -m benchmarks peer flower-torch

      python -m benchmarks footprint --python device/bin/python --repeat 10
    """

    with reporting(console=errors) as say:
        other = flower or interpreter(peers()["flower-torch"]) or ""
        rows = measure(repeat, python or sys.executable, other, say)
    for row in rows:
        if row.error:
            errors.print(f"{row.what}: {row.error}", style="yellow")
    report("footprint", "footprint: connected and idle", rows, _footprint_columns, as_json)
    if all(row.error for row in rows):
        raise typer.Exit(1)


def _footprint_columns(row: FootprintRow) -> dict[str, Any]:
    return {
        "what": row.what,
        "anonymous": _size(row.idle_anonymous_bytes),
        "PSS": _size(row.idle_pss_bytes),
        "RSS": _size(row.idle_rss_bytes),
        "ready s": row.ready_s,
        "training": _size(row.training_peak_bytes),
        "installed": _size(row.installed_bytes),
        "packages": len(row.packages),
    }


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)


@dataclass(frozen=True)
class ClientKind:
    """A kind of client in Python. Packages are named as in :mod:`benchmarks.workers.installed`.

    ``engine`` is empty for a Flower client.
    """

    what: str
    packages: tuple[str, ...]
    as_pip_installs: tuple[str, ...] = ()
    engine: str = ""

    def start(self, python: str, repeat: int) -> Iterator[IdleClient]:
        """Start ``repeat`` clients, one after the other."""
        if self.engine:
            return idle_agents(device_command(python), self.engine, repeat)
        return idle_flower_clients(python, repeat)


# A device needs executorch's libraries, but none of the package's requirements (coremltools, pandas, torchao, ...).
_WITHOUT_ONNX = tuple(name for name in DEVICE if name != "onnxruntime")
KINDS = (
    ClientKind("edgefl-onnx", DEVICE, engine="onnx"),
    ClientKind(
        "edgefl-executorch", (*_WITHOUT_ONNX, "executorch!"), (*DEVICE, "executorch"), engine="executorch"
    ),
    ClientKind("flower-torch", ("flwr", "torch")),
)


def measure(
    repeat: int = 5,
    python: str = sys.executable,
    flower: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> list[FootprintRow]:
    """Measure each of KINDS, and the C++ agent if there is one.

    Args:
        repeat: fresh processes of each kind.
        python: interpreter of a device's environment.
        flower: interpreter of an environment with Flower and torch, "" for none.
        say: receives the progress as text.
    """
    rows = []
    for kind in KINDS:
        say(f"{kind.what}: {repeat} processes, one after the other")
        rows.append(python_row(kind, python if kind.engine else flower, repeat))
    try:
        (agent,) = lab_agents.command_of(lab_agents.CPP)
    except ConfigError as error:
        say(f"{CPP} is left out: {error.message}")
        return rows
    say(f"{CPP}: {repeat} processes of {agent}, one after the other")
    return [*rows, _cpp_row(Path(agent), repeat)]


def _cpp_row(agent: Path, repeat: int) -> FootprintRow:
    """The C++ agent on ExecuTorch."""
    problems, runs, peak = [], list[IdleClient](), None
    files: Mapping[str, int] = {}
    try:
        files = sizes(agent)
        runs = list(idle_agents([str(agent)], "executorch", repeat))
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


def python_row(kind: ClientKind, python: str, repeat: int) -> FootprintRow:
    """Measure one kind of client in the environment of ``python``."""
    problems = []
    runs: list[IdleClient] = []
    peak: int | None = None
    packages: installed_worker.Found = {}
    whole: installed_worker.Found = {}
    try:
        if not python:
            raise EdgeflError(
                "--flower names no interpreter; `python -m benchmarks peer flower-torch` makes an environment"
            )
        packages = installed(python, kind.packages)
        whole = installed(python, kind.as_pip_installs or kind.packages)
    except EdgeflError as error:
        problems.append(error.message)
    try:
        runs = list(kind.start(python, repeat)) if python else []
        peak = training_peak(device_command(python), kind.engine) if kind.engine else None
    except EdgeflError as error:
        problems.append(error.message)
    own = own_bytes() if kind.engine else 0
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


def _medians(runs: Sequence[IdleClient]) -> dict[str, Any]:
    """Return the fields of a row that describe its processes."""
    return {
        "idle_rss_bytes": _median([run.idle_rss_bytes for run in runs]),
        "idle_anonymous_bytes": _median([run.idle_anonymous_bytes for run in runs]),
        "idle_pss_bytes": _median([run.idle_pss_bytes for run in runs]),
        "ready_s": round(statistics.median([run.ready_s for run in runs]), 3) if runs else None,
        "ready_min_s": round(min(run.ready_s for run in runs), 3) if runs else None,
    }


def _median(values: Sequence[int]) -> int | None:
    return int(statistics.median(values)) if values else None


def _sum(found: installed_worker.Found, key: str, more: int) -> int | None:
    return sum(int(str(size[key])) for size in found.values()) + more if found else None


def installed(python: str, names: Sequence[str]) -> installed_worker.Found:
    """Return sizes of packages in the environment of ``python``. Raises EdgeflError if one is not installed."""
    script = Path(installed_worker.__file__)
    # Isolated: a folder of sources must not replace a package.
    done = subprocess.run(
        [python, "-I", str(script), *names], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise EdgeflError(
            f"sizes of {', '.join(names)}: {last_line(done.stderr, 'no answer')}; install what is missing, "
            "or give another environment's interpreter"
        )
    sizes: installed_worker.Found = json.loads(done.stdout)
    return sizes


def own_bytes() -> int:
    """Return the size of our own packages on disk, the server's included."""
    files = [file for folder in folders(*PACKAGES) for file in folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file() and "__pycache__" not in file.parts)


_SYSTEM = re.compile(r"^(ld-linux.*|linux-vdso|libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.")
"""Libraries of every system that runs C++ programs."""
_RUNTIME = "libexecutorch.so"
_OPENED = ("libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so")
"""Libraries that the engine opens when it starts; the binary does not name them."""
_LOADED = re.compile(r"^\s*(\S+) => (/\S+) \(", re.MULTILINE)


def sizes(agent: Path) -> Mapping[str, int]:
    """Return the bytes of the agent and of each library that it loads beside the system's, without symbols.

    Raises EdgeflError if ``ldd`` or ``strip`` fails.
    """
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


def training_peak(agent: Sequence[str], engine: str) -> int:
    """Return the highest resident memory of an agent and its children in a round, sampled every 20 ms.

    Args:
        agent: command that takes the options of `edgefl device`.
        engine: its engine.

    Raises:
        EdgeflError: the round did not end.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        port = stack.enter_context(lab_broker(folder, READY_S))
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
        return _peak_until_done(serving, training, folder / "log")


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


def _peak_until_done(server: subprocess.Popen[bytes], agent: subprocess.Popen[bytes], log: Path) -> int:
    peak, deadline = 0, time.monotonic() + TRAINING_S
    while server.poll() is None and time.monotonic() < deadline:
        if agent.poll() not in (None, 0):
            break
        peak = max(peak, resident_bytes(family(agent.pid)))
        time.sleep(_EVERY_S)
    if server.poll() != 0:
        last = last_line(log.read_text(errors="replace"), "no output")
        raise EdgeflError(f"the round in which the agent trains did not end: {last}")
    return peak


@dataclass(frozen=True)
class IdleClient:
    """Start time and memory of one client process with its children, as in :class:`FootprintRow`."""

    ready_s: float
    idle_rss_bytes: int
    idle_anonymous_bytes: int
    idle_pss_bytes: int


def idle_agents(command: Sequence[str], engine: str, repeat: int) -> Iterator[IdleClient]:
    """Measure agents against a real broker. An agent is ready when its hello arrives, after its subscriptions.

    Args:
        command: command that takes the options of `edgefl device`.
        engine: engine of the agents.
        repeat: number of agents, one after the other.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        port = stack.enter_context(lab_broker(folder, READY_S))
        generator = np.random.default_rng(0)
        x = generator.standard_normal((SAMPLES, 3, 32, 32), np.float32)
        np.savez(folder / "data.npz", x=x, y=generator.integers(0, 10, SAMPLES))
        topics = Topics(FEDERATION)
        hellos = {f"device-{number}": topics.device(f"device-{number}").hello for number in range(repeat)}
        with _received_topics(port, list(hellos.values())) as received:
            for device, hello in hellos.items():
                options = ["--id", device, "--federation", FEDERATION, "--broker", f"{HOST}:{port}"]
                options += ["--data", str(folder / "data.npz"), "--store", str(folder / device)]
                yield _start([*command, *options, "--engine", engine], received, hello)


def device_command(python: str) -> list[str]:
    """Return the command of ``edgefl device`` in the environment of an interpreter."""
    return [python, "-m", "edgefl", "device"]


def idle_flower_clients(python: str, repeat: int) -> Iterator[IdleClient]:
    """Measure Flower clients with torch. A client is ready when a Flower server counts it among its clients."""
    module = [python, "-m", "benchmarks.workers.flower_client"]
    with import_path() as path:
        environment = {"PYTHONPATH": str(path)}
        for _ in range(repeat):
            port = free_port(HOST)
            with _process([*module, "server", str(port)], environment) as (server, output):
                if not listens(port, server, READY_S):
                    raise _NotReady
                yield _start([*module, "client", str(port)], output, "connected", environment)


def _start(
    command: Sequence[str], lines: queue.Queue[str], ready: str, environment: Mapping[str, str] | None = None
) -> IdleClient:
    """Start a client, which is ready when the line ``ready`` arrives, and measure it."""
    began = time.perf_counter()
    with _process(command, environment) as (process, _):
        _wait_for(lines, ready)
        seconds = time.perf_counter() - began
        time.sleep(SETTLE_S)
        if process.poll() is not None:
            raise EdgeflError(
                f"a client ended as soon as it was connected, with exit code {process.returncode}"
            )
        client = psutil.Process(process.pid)
        usages = [each.memory_full_info() for each in (client, *client.children(recursive=True))]
    return IdleClient(
        seconds,
        sum(each.rss for each in usages),
        sum(each.rss - each.shared for each in usages),
        sum(each.pss for each in usages),
    )


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str]]]:
    """Run a process inside the block; yield it and the lines of its output."""
    output: queue.Queue[str] = queue.Queue()
    quiet = quiet_environment() | {"PYTHONUNBUFFERED": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **quiet, **(environment or {})},
        )
        threading.Thread(target=_read_lines, args=(process, output), daemon=True).start()
        try:
            yield process, output
        except _NotReady as error:
            log.seek(0)
            why = last_line(log.read(), "no output")
            raise EdgeflError(
                f"{' '.join(command[1:4])} was not ready within {READY_S:g} s: {why}"
            ) from error
        finally:
            end_process(process, 5.0)


class _NotReady(Exception):
    """Timeout of a process that should have become ready."""


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.strip())


def _wait_for(lines: queue.Queue[str], expected: str) -> None:
    deadline = time.monotonic() + READY_S
    with contextlib.suppress(queue.Empty):
        while lines.get(timeout=max(0.0, deadline - time.monotonic())) != expected:
            pass
        return
    raise _NotReady


class _ReceivedTopics:
    """Queue of a session's events that keeps the topics of its messages."""

    def __init__(self) -> None:
        self.topics: queue.Queue[str] = queue.Queue()
        self.connected = threading.Event()

    def put(self, event: Event) -> None:
        """Take an event of the session."""
        if isinstance(event, Connected):
            self.connected.set()
        elif isinstance(event, IncomingMessage):
            self.topics.put(event.topic)


@contextlib.contextmanager
def _received_topics(port: int, topics: Sequence[str]) -> Iterator[queue.Queue[str]]:
    """Subscribe to ``topics``; yield a queue that receives the topic of each message."""
    received = _ReceivedTopics()
    session = Session(Address(HOST, port), f"{FEDERATION}-observer", limits=Limits(), events=received)
    session.subscribe(topics)
    session.start()
    try:
        if not received.connected.wait(READY_S):
            raise _NotReady
        yield received.topics
    finally:
        session.stop()
