"""The package in a clean Debian: installed, enrolled, upgraded in the middle of a round, purged."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from tests import needs
from tests.agents.deb import debian_root
from tests.agents.deb.debian_root import Service, within
from tests.conftest import BrokerProcess
from tests.e2e.runs import EDGEFL, TINY
from tests.support.commands import run_command
from tests.wire.mqtt.events import PATIENCE_S

pytestmark = pytest.mark.slow
FEDERATION = "packaged"
STEPS = 300
CONFIG = (
    TINY.replace('name = "e2e"', f'name = "{FEDERATION}"\nrounds = 2').replace(
        "steps = 3", f"steps = {STEPS}"
    )
    + """
[round]
min_devices = 1
[tiers.whole]
"""
)
STORE = "var/lib/edgefl-agent/store/store.sqlite3"


@pytest.fixture(scope="module", autouse=True)
def root_of_debian() -> None:
    debian_root.require_root()


@pytest.fixture(scope="module")
def package() -> Path:
    return debian_root.build_package(1)


@contextmanager
def serving(folder: Path, broker: str, key: Path, devices: Path) -> Iterator[subprocess.Popen[str]]:
    """A server of enrolled devices, until it is ended."""
    config = folder / "federation.toml"
    config.write_text(CONFIG)
    command = [*EDGEFL, "server", "--config", config, "--broker", broker, "--out", folder / "out", "--json"]
    command += ["--sign-key", key, "--enrolled", devices]
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def checkpoint_step(root: Path) -> int:
    """Return the local step up to which the agent has stored its round, 0 without a checkpoint."""
    try:
        with closing(sqlite3.connect(f"file:{root / STORE}?mode=ro", uri=True)) as store:
            row = store.execute("SELECT MAX(step) FROM checkpoint").fetchone()
    except sqlite3.OperationalError:
        return 0
    return int(row[0] or 0)


def test_a_round_an_upgrade_in_a_round_and_a_purge(
    package: Path, mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    upgrade = debian_root.build_package(2)
    key, devices, data = tmp_path / "server.key", tmp_path / "devices.sqlite", tmp_path / "data.npz"
    run_command(*EDGEFL, "key", "new", key, check=True)
    named = ("--list", devices, "--federation", FEDERATION, "--sign-key", key)
    token = run_command(*EDGEFL, "enroll", "token", "pi-1", *named, check=True).stdout.split()[-1]
    rows = digits()
    write_client(data, rows.train_x[:60], rows.train_y[:60].astype(np.int64))

    with debian_root.over(debian_root.base_root(), tmp_path / "over") as root:
        debian_root.pretend_systemd(root)
        debian_root.install(root, package)
        asked = root / debian_root.SYSTEMCTL_LOG
        assert "preset edgefl-agent.service" in asked.read_text()
        assert " start edgefl-agent.service" in asked.read_text()
        (condition,) = debian_root.read_unit((root / debian_root.UNIT).read_text())["Service"][
            "ExecCondition"
        ]
        as_agent = ("--userspec=edgefl-agent:edgefl-agent", root, "sh", "-c", condition)
        assert run_command("chroot", *as_agent).returncode == 1, "nothing is configured"
        as_other = ("--userspec=nobody:nogroup", root, "cat", "/etc/edgefl/agent.toml")
        assert run_command("chroot", *as_other).returncode == 1, "a broker's password may be in it"

        debian_root.put_for_agent(root, "token", token.encode())
        debian_root.put_for_agent(root, "data.npz", data.read_bytes())
        debian_root.configure(
            root,
            id="pi-1",
            federation=FEDERATION,
            broker=str(mosquitto.address),
            data="/var/lib/edgefl-agent/data.npz",
            json=True,
            duty=0.02,
            limit=["checkpoint_steps=1"],
        )
        run_command("chroot", *as_agent, check=True)

        with serving(tmp_path, str(mosquitto.address), key, devices):
            agent = Service(root)
            agent.wait_note("READY=1")
            agent.wait_note("WATCHDOG=1")
            agent.wait_event("enrolled")
            assert not (root / "var/lib/edgefl-agent/token").exists()
            agent.wait_event("round")
            deadline = time.monotonic() + PATIENCE_S
            while checkpoint_step(root) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)

            shutil.copy(upgrade, root / "tmp" / upgrade.name)
            asked.write_text("")
            within(root, "dpkg", "-i", f"/tmp/{upgrade.name}")
            assert "restart edgefl-agent.service" in asked.read_text()
            assert "stop" not in asked.read_text()
            assert agent.process.poll() is None, "the old release runs until the new one is configured"
            step = checkpoint_step(root)
            assert 0 < step < STEPS, f"the upgrade was to end within the round, at step {step}"
            assert agent.stop() == 0
            step = checkpoint_step(root)
            assert 0 < step < STEPS

            agent = Service(root)
            agent.wait_note("READY=1")
            deadline = time.monotonic() + PATIENCE_S
            while (first := checkpoint_step(root)) == step and time.monotonic() < deadline:
                time.sleep(0.02)
            assert first > step, "a round that is not resumed stores its first steps anew"
            text = agent.wait_event("accepted")["text"]
            assert text.startswith("round 1")
            assert agent.stop() == 0

        kept = run_command(*EDGEFL, "enroll", "ls", "--list", devices, "--federation", FEDERATION, "--json")
        assert "pi-1" in kept.stdout
        within(root, "dpkg", "--purge", "edgefl-agent")
        found = within(root, "find", "/etc", "/usr", "/lib", "/var", "-name", "*edgefl*").stdout
        assert found == ""
        assert within(root, "dpkg", "--audit").stdout == ""


def test_the_unit_verifies(package: Path, tmp_path: Path) -> None:
    """In a root with the package's files, since systemd looks for the programs that a unit names, and this machine's
    targets."""
    needs.require("systemd-analyze")
    with debian_root.over(debian_root.base_root(), tmp_path / "over") as root:
        shutil.copytree("/lib/systemd/system", root / "lib/systemd/system", symlinks=True, dirs_exist_ok=True)
        run_command("dpkg-deb", "--extract", package, root, check=True)
        ran = run_command("systemd-analyze", "verify", f"--root={root}", "edgefl-agent.service")
    newer = ("RestartSteps", "RestartMaxDelaySec")
    warned = [line for line in ran.stderr.splitlines() if not any(name in line for name in newer)]
    assert (ran.returncode, warned) == (0, [])


def test_lintian_finds_no_errors(package: Path) -> None:
    lintian = needs.require("lintian")
    ran = run_command(
        lintian, "--fail-on", "error", "--tag-display-limit", "0", "--allow-root", package, timeout=600
    )
    assert ran.returncode == 0, ran.stdout
