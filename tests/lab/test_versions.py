"""Devices that are not waited for, as processes: one of them slow, the server killed, and the run repeated bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.federations import lab_of, small_federation
from edgefl.analysis.replay import replay
from edgefl.cli.commands import app
from edgefl.config import Federation, parse
from edgefl.lab.faults.schedule import Fault, Schedule
from edgefl.lab.lab import Lab, Restart, ServerEvent
from edgefl.setup.data import open_data, partition
from edgefl.system.distribution import PACKAGES, folders, version
from edgefl.wire import tensors
from tests.cli.runner import runner
from tests.e2e.runs import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VERSIONS, BUFFER = 5, 2


@dataclass(frozen=True)
class Ran:
    folder: Path
    closed: list[dict[str, Any]]
    accepted: list[dict[str, Any]]
    restarted: set[str]


@pytest.fixture(scope="module")
def federation() -> Federation:
    tables: dict[str, Any] = {
        "federation": {"name": "versions", "rounds": VERSIONS},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"batch": 8, "steps": 60},
        "codec": {"name": "ef_signsgd"},
        "data": {"name": "digits", "train_samples": 90, "test_samples": 50},
        "round": {
            "mode": "buffered",
            "buffer": BUFFER,
            "min_devices": 3,
            "max_staleness": 4,
            "keep_updates": True,
        },
        "tiers": {"strong": {"count": 2}, "weak": {"cut": 1, "count": 1}},
        "broker": {"kind": "mosquitto"},
        "limits": {"checkpoint_steps": 1000, "ack_timeout_s": 3.0, "round_deadline_s": 200.0},
    }
    return parse(tables, source="the test")


@pytest.fixture(scope="module")
def ran(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("versions")
    slow = folder / "slow.toml"
    slow.write_text("duty = 0.02\n")
    lab = Lab(federation, folder / "run", policies={"weak-0": slow})
    dataset = open_data(federation)
    lab.folder.mkdir()
    lab.prepare(dataset, partition(federation, dataset, len(lab.devices)))
    lab.disturb(Schedule(faults=(Fault(kind="kill", target="server", round=3),)))
    closed, accepted, restarted = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    try:
        lab.start()
        for news in lab.events(patience_s=PATIENCE_S):
            if isinstance(news, Restart):
                restarted.add(news.name)
            elif isinstance(news, ServerEvent) and news.event.get("event") == "roundclosed":
                closed.append(news.event)
            elif isinstance(news, ServerEvent) and news.event.get("event") == "updateaccepted":
                accepted.append(news.event)
        lab.finish()
    finally:
        lab.stop()
    yield Ran(lab.folder, closed, accepted, restarted)


def test_each_version_has_its_updates_and_each_update_is_in_one(ran: Ran) -> None:
    rounds = {each["round"]: each for each in ran.closed}
    assert sorted(rounds) == list(range(1, VERSIONS + 1)) and ran.restarted == {"server"}
    assert {each["reports"] for each in rounds.values()} == {BUFFER}
    # A killed server tells of what it has in its journal once more.
    assert len({each["nonce"] for each in ran.accepted}) == VERSIONS * BUFFER
    assert max(each["round"] for each in ran.accepted) > 1


def test_it_is_repeated_from_its_journal_to_the_same_bits(ran: Ran) -> None:
    done = replay(ran.folder)
    assert done.same and [each.updates for each in done.rounds] == [BUFFER] * VERSIONS
    model = tensors.load((ran.folder / "model.safetensors").read_bytes())
    assert all((array == model[name]).all() for name, array in done.rounds[-1].weights.items())


def test_the_first_round_with_other_bits_is_named(ran: Ran) -> None:
    with closing(sqlite3.connect(ran.folder / "journal.sqlite")) as journal:
        journal.execute("UPDATE updates SET share = share * 0.5 WHERE step = 4")
        journal.commit()
    told = runner().invoke(app, ["replay", str(ran.folder), "--json"])
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert told.exit_code == 1 and [row["same"] for row in rows] == [True] * 3 + [False]
    done = replay(ran.folder)
    assert done.first == 4 and "head.dense.weight" in done.differ


# -- A federation that is under way goes on when the server's package is replaced by the next patch release --


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def upgrade_federation() -> Federation:
    return small_federation(broker="auto")


def next_patch(folder: Path) -> Path:
    """The packages as the next patch release would install them."""
    for source in folders(*PACKAGES):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    *series, patch = version().split(".")
    newer = ".".join([*series, str(int(patch) + 1)])
    project = (ROOT / "pyproject.toml").read_text()
    project, count = re.subn(r'(?m)^default-version = ".*"$', f'default-version = "{newer}"', project)
    assert count == 1
    (folder / "pyproject.toml").write_text(project)
    main = folder / "edgefl" / "__main__.py"
    begun = 'import os, pathlib\npathlib.Path(os.environ["EDGEFL_UPGRADED"]).touch()\n'
    main.write_text(f"{begun}{main.read_text()}")
    return folder


def digests(federation: Federation, folder: Path, upgrade: Path | None = None) -> dict[int, str]:
    """Weights after each round. After the first, the server is stopped; its next process is one of ``upgrade``."""
    lab, closed = lab_of(federation, folder), dict[int, str]()
    try:
        lab.start()
        for news in lab.events(patience_s=400):
            if not isinstance(news, ServerEvent) or news.event.get("event") != "roundclosed":
                continue
            closed[news.event["round"]] = news.event["weights_sha256"]
            if upgrade is not None:  # once: a round that a killed server had not told of is told again
                path = os.pathsep.join(filter(None, (str(upgrade), os.environ.get("PYTHONPATH", ""))))
                more = {"EDGEFL_UPGRADED": str(folder / "upgraded"), "PYTHONSAFEPATH": "1"}
                lab.supervisor.replace("server", {"PYTHONPATH": path, **more})
                upgrade = None
        lab.finish()
    finally:
        lab.stop()
    return closed


def test_a_run_goes_on_under_the_next_patch_release(upgrade_federation: Federation, tmp_path: Path) -> None:
    newer = next_patch(tmp_path / "newer")

    assert digests(upgrade_federation, tmp_path / "upgraded", newer) == digests(
        upgrade_federation, tmp_path / "calm"
    )
    assert (tmp_path / "upgraded" / "upgraded").exists(), "the second server is the newer one"
    told = (tmp_path / "upgraded" / "audit.jsonl").read_bytes()
    assert told.count(b'"event":"started"') == 2
