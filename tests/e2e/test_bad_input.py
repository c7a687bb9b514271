"""The mistakes people make get one clear line and a non-zero exit, and never a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.lab import CONFIG_NAME, discard
from edgefl.wire.errors import BrokerError, BundleError, ConfigError, DataError, ModelError
from tests.e2e.runs import EDGEFL, SMALL, Run, on_both_engines

pytestmark = pytest.mark.e2e


def edgefl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EDGEFL, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )


def refused(ran: subprocess.CompletedProcess[str], kind: type[Exception], *words: str) -> None:
    assert ran.returncode == kind.exit_code, ran.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in ran.stderr
    for word in words:
        assert word in ran.stderr, ran.stderr


def test_every_wrong_key_of_a_federation_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(
        '[model]\nnam = "resnet8"\n[round]\nfraction = 2.0\n[limits]\nchunk = 1\n[tiers.weak]\ncuts = 3\n'
    )

    refused(edgefl("validate", file), ConfigError, "model.nam", "round.fraction", "tiers.weak.cuts")


def test_the_template_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(edgefl("validate", "--template").stdout)

    assert edgefl("validate", file).returncode == 0


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    refused(edgefl("export", "--model", "resnet9", "--out", tmp_path), ModelError, "resnet9", "resnet20")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        config = tmp_path / "federation.toml"
        config.write_text(SMALL + f"[broker]\nport = {port}\n")

        refused(edgefl("broker", "--port", port), BrokerError, port, "in use")
        refused(edgefl("run", config, "--out", tmp_path / "run"), BrokerError, port, "in use")


@pytest.mark.parametrize("damage", ["missing", "truncated", "no zip"])
def test_a_damaged_bundle_is_refused(tmp_path: Path, damage: str) -> None:
    bundle = tmp_path / "weak.efl"
    if damage == "truncated":
        made = edgefl("export", "--model", "mlp", "--out", tmp_path)
        assert made.returncode == 0, made.stderr
        bundle.write_bytes((tmp_path / "strong.efl").read_bytes()[:5000])
    elif damage == "no zip":
        bundle.write_text("hello")

    refused(edgefl("inspect", bundle), BundleError, "weak.efl")


@on_both_engines
@pytest.mark.parametrize("data", ["missing.npz", "damaged.npz", "empty"])
def test_local_data_that_cannot_be_read_are_named(tmp_path: Path, data: str, engine: str) -> None:
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()

    device = ("device", "--id", "d", "--store", tmp_path / "s", "--engine", engine)
    refused(edgefl(*device, "--data", tmp_path / data), DataError, data)


@on_both_engines
def test_local_data_of_another_shape_end_the_device_with_both_shapes(tmp_path: Path, engine: str) -> None:
    run = Run.start(tmp_path / "run", ["--rounds", "30", "--engine", engine])
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    write_client(
        run.folder / "devices" / "weak-0" / "data.npz",
        np.zeros((9, 1, 5, 5), np.uint8),
        np.zeros(9, np.int64),
    )
    run.kill("weak-0")

    assert run.process.wait(600) != 0
    said = run.errors()
    assert "(1, 5, 5)" in said
    assert "(1, 8, 8)" in said


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", ["--rounds", "1"])
    run.finish()
    before = (tmp_path / "run" / "model.safetensors").read_bytes()

    again = edgefl("run", tmp_path / "run.toml", "--rounds", "1", "--out", tmp_path / "run")

    refused(again, ConfigError, "--fresh")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_fresh_removes_what_a_run_left_and_nothing_else(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(SMALL)
    (tmp_path / "thesis.tex").write_text("years of work")
    first = edgefl("run", config, "--rounds", "1", "--out", tmp_path, "--json")
    assert first.returncode == 0, first.stderr

    again = edgefl("run", config, "--rounds", "1", "--out", tmp_path, "--json", "--fresh")

    assert again.returncode == 0, again.stderr
    assert (tmp_path / "thesis.tex").exists()
    assert config.exists()


def test_a_model_that_cannot_be_built_ends_the_run_soon(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(classes):\n    raise ValueError('no such layer')\n")
    config = tmp_path / "federation.toml"
    config.write_text('[model]\nname = "broken:make"\n[data]\nname = "digits"\n[tiers.strong]\ncount = 1\n')

    ran = subprocess.run(
        [*EDGEFL, "run", str(config), "--out", str(tmp_path / "run"), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    refused(ran, ModelError, "broken:make", "no such layer")


def test_a_cut_behind_the_last_unit_is_not_valid(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text("[tiers.weak]\ncut = 99\n")

    refused(edgefl("validate", config), ModelError, "99")


def test_fresh_removes_what_was_published(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "round-0000.msgpack").write_bytes(b"weights of the run before")
    (tmp_path / CONFIG_NAME).write_text("")
    discard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fresh_spares_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    refused(edgefl("run", "--out", tmp_path, "--fresh"), ConfigError, "left alone")
    assert (tmp_path / "thesis.tex").exists()


@on_both_engines
def test_a_device_waits_for_a_broker_that_is_away_and_says_so(tmp_path: Path, engine: str) -> None:
    data = digits()
    write_client(tmp_path / "data.npz", data.train_x[:10], data.train_y[:10])
    command = [
        *EDGEFL,
        "device",
        "--id",
        "d",
        "--broker",
        "127.0.0.1:1",
        "--engine",
        engine,
        "--data",
        str(tmp_path / "data.npz"),
    ]
    device = subprocess.Popen([*command, "--store", str(tmp_path / "s")], stdout=subprocess.PIPE)
    try:
        assert device.stdout is not None
        lines = [device.stdout.readline().decode() for _ in range(2)]
    finally:
        device.terminate()

    assert all("cannot reach the broker" in line and "trying again" in line for line in lines)
    assert device.wait(120) == 0
