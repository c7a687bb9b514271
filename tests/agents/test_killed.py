"""Python's agent, the C++ agent and browsers train one model, and each of them is killed at random and started again."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from edgefl.lab.agents import command_of
from tests import needs
from tests.e2e.runs import Calm, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AGENTS = {"python": 2, "cpp": 2, "web": 2}
KILLS_EACH = 3
ROUNDS = 12
CONFIG = f"""
[federation]
name = "killed"
rounds = {ROUNDS}
seed = 3
[model]
name = "mlp"
options = {{ hidden = [256] }}
[algorithm]
batch = 8
steps = 60
lr = 0.05
[codec]
name = "ef_signsgd"
[data]
name = "digits"
train_samples = 360
test_samples = 100
[limits]
checkpoint_steps = 3
chunk_bytes = 1024
ack_timeout_s = 3
[tiers.strong]
[tiers.weak]
cut = 1
chunks = 1
"""


def require_agents() -> None:
    """Skip the test if one of the kinds cannot be started."""
    for kind in ("cpp", "web"):
        try:
            command_of(kind)
        except ConfigError as error:
            needs.skip(error.message)


def kill_by_lot(run: Run, devices: list[str], lot: random.Random) -> int:
    """SIGKILL every device ``KILLS_EACH`` times, in an order and at moments of chance. How many kills hit the run."""
    order = devices * KILLS_EACH
    lot.shuffle(order)
    hits = 0
    for name in order:
        time.sleep(lot.uniform(0.1, 0.8))
        if run.process.poll() is not None or name not in run.pids():
            break
        run.kill(name)
        hits += 1
    return hits


def test_killed_agents_end_with_the_same_weights(tmp_path: Path) -> None:
    require_agents()
    arguments = ["--agents", ",".join(f"{kind}:{count}" for kind, count in AGENTS.items())]
    calm = Calm.of(tmp_path / "calm", arguments, CONFIG)
    run = calm.beside(tmp_path / "killed")
    run.wait_until(lambda: len(run.pids()) > sum(AGENTS.values()) and len(run.rounds) >= 1, "first round")
    devices = sorted(path.name for path in (run.folder / "devices").iterdir())

    hits = kill_by_lot(run, devices, random.Random(22))
    rounds = run.finish()

    assert [row["reports"] for row in rounds] == [len(devices)] * ROUNDS
    assert hits == len(devices) * KILLS_EACH
    assert rounds[-1]["weights_sha256"] == calm.weights_sha256
