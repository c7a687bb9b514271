"""The mistakes people make get one clear line and a non-zero exit, and never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.errors import BrokerError, BundleError, ConfigError, DataError, ModelError
from edgefl.wire.bundle.archive import write_bundle
from tests.e2e.inside import edgefl, in_a_process, refused
from tests.e2e.runs import EDGEFL, TINY, Calm
from tests.wire.example_manifests import example_bundle

pytestmark = pytest.mark.e2e


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


@pytest.mark.slow
def test_a_port_in_use_ends_a_run(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        config = tmp_path / "federation.toml"
        config.write_text(TINY + f"[broker]\nport = {port}\n[tiers.strong]\ncount = 1\n")

        refused(in_a_process("run", config, "--out", tmp_path / "run"), BrokerError, port, "in use")


@pytest.mark.parametrize("damage", ["missing", "truncated", "no zip"])
def test_a_damaged_bundle_is_refused(tmp_path: Path, damage: str) -> None:
    bundle = tmp_path / "weak.efl"
    if damage == "truncated":
        write_bundle(example_bundle(), bundle)
        bundle.write_bytes(bundle.read_bytes()[:500])
    elif damage == "no zip":
        bundle.write_text("hello")

    refused(edgefl("inspect", bundle), BundleError, "weak.efl")


@pytest.mark.parametrize("data", ["missing.npz", "damaged.npz", "empty"])
def test_local_data_that_cannot_be_read_are_named(tmp_path: Path, data: str) -> None:
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()

    device = ("device", "--id", "d", "--store", tmp_path / "s", "--engine", "onnx")
    refused(in_a_process(*device, "--data", tmp_path / data), DataError, data)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["strong-0", "weak-0"])  # one on each engine
def test_a_device_with_data_of_another_shape_declines(tmp_path: Path, calm: Calm, device: str) -> None:
    run = calm.beside(tmp_path / "run", "--rounds", "500")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    write_client(
        run.folder / "devices" / device / "data.npz",
        np.zeros((9, 1, 5, 5), np.uint8),
        np.zeros(9, np.int64),
    )
    os.kill(run.pids()[device], signal.SIGKILL)

    log = run.folder / "logs" / f"{device}.log"
    run.wait_until(lambda: "(wrong-data)" in log.read_text(), "decline of the device")
    done = len(run.rounds)
    run.wait_until(lambda: len(run.rounds) > done, "a round of the others")
    run.process.terminate()
    said = log.read_text()
    assert "(1, 5, 5)" in said
    assert "(1, 8, 8)" in said


def test_a_model_that_cannot_be_built_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_model.py").write_text("def make(classes):\n    raise ValueError('no such layer')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "federation.toml"
    config.write_text(
        '[model]\nname = "broken_model:make"\n[data]\nname = "digits"\n[tiers.strong]\ncount = 1\n'
    )

    ran = edgefl("run", config, "--out", tmp_path / "run", "--json")

    refused(ran, ModelError, "broken_model:make", "no such layer")


def test_a_cut_behind_the_last_unit_is_not_valid(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text("[tiers.weak]\ncut = 99\n")

    refused(edgefl("validate", config), ConfigError, "tiers.weak.cut", "99")
    refused(edgefl("export", config, "--out", tmp_path), ConfigError, "tiers.weak.cut", "99")


def test_fresh_spares_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    refused(edgefl("run", "--out", tmp_path, "--fresh"), ConfigError, "left alone")
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("engine", ["onnx", pytest.param("executorch", marks=pytest.mark.slow)])
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
