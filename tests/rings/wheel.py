"""What ``python -m build`` made: whether the distributions are complete, and whether they train where they are installed.

``python -m tests.rings.wheel files FOLDER`` looks into the wheel and the source distribution of a folder;
``python -m tests.rings.wheel trains DEVICE SERVER`` lets the environments DEVICE and SERVER, which have the wheel with the
extra of that name and nothing else, train a federation together.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from email import message_from_string
from pathlib import Path

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.broker import free_port
from edgefl.system.distribution import NAME, PACKAGES

WANTED = (
    "edgefl_device/engine/executorch/native.cpp",
    "edgefl/data/digits.csv.gz",
    "edgefl/facts/facts.json",
    "edgefl/web/static/LICENSES.txt",
    "edgefl/web/static/index.html",
    "edgefl/web/static/ort/ort-wasm-simd-threaded.wasm.gz",
    "edgefl/web/static/worker.js",
    "edgefl_server/dashboard/monitoring/alerts.yml",
    "edgefl_server/dashboard/monitoring/grafana.json",
    "edgefl_server/dashboard/static/page.js",
    "edgefl_server/dashboard/static/uPlot.LICENSE",
    "edgefl_server/dashboard/static/uPlot.iife.min.js",
    *(f"{package}/py.typed" for package in PACKAGES),
)
EXTRAS = {"device", "server"}
HEAVY = "torch", "onnx", "sqlalchemy", "amqtt", "numba", "scipy", "sklearn"
"""What must not come with a device."""
ROUNDS, SAMPLES, PATIENCE_S = 2, 100, 300.0
ROUND = """
import sys, numpy, edgefl
data = numpy.load("data.npz")
result = edgefl.train_round("out/bundles/strong.efl", "out/model.safetensors", data["x"], data["y"])
print(result.samples, "torch" in sys.modules)
"""
"""A round in a device's own process, from the API."""
CONFIG = f"""
[federation]
name = "wheel"
rounds = {ROUNDS}
[model]
name = "mlp"
options = {{ hidden = [16] }}
[algorithm]
batch = 8
steps = 5
[data]
name = "digits"
[round]
min_devices = 2
[tiers.strong]
cut = 0
"""


def problems(folder: Path) -> list[str]:
    """What is missing from the distributions in ``folder``, and what does not belong into the wheel."""
    stem = NAME.replace("-", "_")
    wheels, sources = sorted(folder.glob(f"{stem}-*.whl")), sorted(folder.glob(f"{stem}-*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [
            f"one wheel and one source distribution were expected, found {len(wheels)} and {len(sources)}"
        ]
    with tarfile.open(sources[0]) as source:
        inside = [name.partition("/")[2] for name in source.getnames()]
    inside = [re.sub("^(server|exporters|device_runtime)/(?=edgefl_)", "", name) for name in inside]
    missing = _missing(sources[0].name, inside, (*WANTED, "pyproject.toml", "README.md", "LICENSE"))
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        facts = message_from_string(wheel.read(metadata).decode())
    missing += _missing(wheels[0].name, names, WANTED)
    tops = {name.partition("/")[0] for name in names}
    strange = sorted(top for top in tops if top not in PACKAGES and not top.endswith(".dist-info"))
    told = [f"{wheels[0].name} has {top}, which is no package of ours" for top in strange]
    extras = EXTRAS - set(facts.get_all("Provides-Extra", []))
    told += [f"{wheels[0].name} has no extra {extra}" for extra in sorted(extras)]
    if facts["License-Expression"] != "Apache-2.0":
        told.append(f"{wheels[0].name} has the licence {facts['License-Expression']}")
    return missing + told


def _missing(where: str, names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    return [f"{where} lacks {name}" for name in wanted if name not in set(names)]


def trains(device: Path, server: Path) -> list[str]:
    """What went wrong in a federation of one device from each of two environments, with the server of the second."""
    with tempfile.TemporaryDirectory(prefix="edgefl-wheel-") as name, ExitStack() as stack:
        folder, data = Path(name), digits()
        write_client(folder / "data.npz", data.train_x[:SAMPLES], data.train_y[:SAMPLES])
        (folder / "federation.toml").write_text(CONFIG)
        port = str(free_port())
        address = ["--broker", f"127.0.0.1:{port}"]

        def start(environment: Path, *arguments: str) -> subprocess.Popen[str]:
            command = [str(environment / "bin" / "edgefl"), *arguments]
            process = subprocess.Popen(command, cwd=folder, env=_alone(), stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(server, "broker", "--port", port)
        agents = [
            start(
                environment,
                *("device", "--id", name, "--federation", "wheel", "--data", "data.npz", "--store", name),
                *("--until-done", "--json", *address),
            )
            for name, environment in (("device", device), ("server", server))
        ]
        served = start(server, "server", "--config", "federation.toml", "--out", "out", "--json", *address)
        events = _events(served)
        accepted = [[event["event"] for event in _events(agent)].count("accepted") for agent in agents]
        alone = _said(str(device / "bin" / "python"), ROUND, name)
    told = [event["reports"] for event in events if event["event"] == "roundclosed"]
    print(f"reports by round: {told}; accepted by device: {accepted}")
    if served.returncode or told != [2] * ROUNDS or accepted != [ROUNDS] * 2:
        return ["the installed federation did not train"]
    return [] if alone.split() == [str(SAMPLES), "False"] else [f"edgefl.train_round: {alone}"]


def _events(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    said, _ = process.communicate(timeout=PATIENCE_S)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def _alone() -> dict[str, str]:
    """Without a way back to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def light(device: Path) -> list[str]:
    """What a device's environment has and should not; tells how long ``import edgefl`` takes there."""
    python = str(device / "bin" / "python")
    code = f"import importlib.util as u; print(*[n for n in {HEAVY} if u.find_spec(n)])"
    with tempfile.TemporaryDirectory() as empty:
        there = _said(python, code, empty)
        _said(python, "import edgefl", empty)  # writes the bytecode
        seconds = [_seconds(python, "import edgefl", empty) for _ in range(5)]
        bare = [_seconds(python, "pass", empty) for _ in range(5)]
    print(
        f"python -c 'import edgefl' takes {statistics.median(seconds):.3f} s there, python alone "
        f"{statistics.median(bare):.3f} s"
    )
    return [f"a device's environment has {name}" for name in there.split()]


def _seconds(python: str, code: str, folder: str) -> float:
    start = time.perf_counter()
    _said(python, code, folder)
    return time.perf_counter() - start


def _said(python: str, code: str, folder: str) -> str:
    command = [python, "-c", code]
    done = subprocess.run(command, cwd=folder, env=_alone(), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    paths = [Path(folder).resolve() for folder in folders]
    told = problems(paths[0]) if what == "files" else light(paths[0]) + trains(*paths)
    sys.exit("\n".join(told) or 0)
