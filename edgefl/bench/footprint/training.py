"""The most that an agent's process holds in memory while it trains one round of a weak tier, of a server like any."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from edgefl.bench.common.machine import quiet_environment
from edgefl.bench.common.processes import family, resident_bytes
from edgefl.bench.footprint.idle import HOST, broker
from edgefl.bench.memory.rows import SAMPLES_PER_DEVICE
from edgefl.config import Federation, parse
from edgefl.config.text import dump
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.system.processes import last_line
from edgefl.wire.errors import EdgeflError
from edgefl.wire.keys import KeyPair

MODEL, TIER, BATCH, STEPS = "resnet20", "weak", 32, 10
PATIENCE_S = 600.0
_EVERY_S = 0.02


def training_peak(agent: Sequence[str], engine: str) -> int:
    """Bytes of resident memory of the agent and its children, the most of a whole round, looked at every 20 ms.

    ``agent``: a command that takes the options of `edgefl device`. EdgeflError if the round does not end.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, broker() as port:
        folder = Path(name)
        federation = _federation(engine, port)
        dataset = open_data(federation)
        dataset.write_device(folder / "data.npz", partition(federation, dataset, 1)[0])
        (folder / "federation.toml").write_text(dump(federation))
        server = [sys.executable, "-m", "edgefl", "server", "--config", str(folder / "federation.toml")]
        server += ["--out", str(folder / "run"), "--sign-key", str(folder / "key")]
        options = ["--id", f"{TIER}-0", "--federation", federation.federation.name, "--until-done"]
        options += ["--broker", f"{HOST}:{port}", "--data", str(folder / "data.npz"), "--engine", engine]
        options += ["--store", str(folder / "store"), "--server-key", KeyPair(folder / "key").public_key]
        environment = os.environ | quiet_environment()
        with (folder / "log").open("wb") as log:
            serving, training = (
                subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                for command in (server, [*agent, *options])
            )
        try:
            return _watched(serving, training, folder / "log")
        finally:
            for process in (serving, training):
                process.kill()
                process.wait()


def _federation(engine: str, port: int) -> Federation:
    tables = {
        "federation": {"name": "bench-footprint", "rounds": 1},
        "model": {"name": MODEL},
        "program": {"steps": STEPS, "batch": BATCH},
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
