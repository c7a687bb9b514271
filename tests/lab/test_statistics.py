"""Statistics of the devices of one machine: their own rows, an owner who refuses, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.cli.commands import app
from edgefl.config import Federation, parse
from edgefl.lab.lab import Lab, ServerEvent
from edgefl.setup.data import open_data, partition
from edgefl.wire.statistics import StatisticsRequest
from edgefl_server.events import DataStatistics
from tests.cli.runner import runner
from tests.system.test_user_files import write_modules

TABLES = {
    "federation": {"name": "lab-statistics"},
    "model": {"name": "mlp"},
    "data": {"name": "digits", "train_samples": 300, "test_samples": 20},
    "tiers": {"strong": {"count": 2}, "weak": {"kind": "width", "gamma": 0.5, "count": 1}},
}


@pytest.fixture
def federation() -> Federation:
    return parse(TABLES, source="the test")


@pytest.mark.slow
def test_an_owner_refuses_statistics_and_the_others_report(federation: Federation, tmp_path: Path) -> None:
    refuses = tmp_path / "refuses.toml"
    refuses.write_text("statistics = false\n")
    lab = Lab(federation, tmp_path / "run", policies={"strong-1": refuses})
    lab.folder.mkdir()
    dataset = open_data(federation)
    rows = partition(federation, dataset, len(lab.devices))
    lab.prepare(dataset, rows, statistics=StatisticsRequest(devices=3))
    closed = []
    try:
        lab.start()
        for news in lab.events(patience_s=120):
            if isinstance(news, ServerEvent) and news.event.get("event") == "roundclosed":
                closed.append(news.event)
        lab.finish()
    finally:
        lab.stop()

    (ended,) = closed
    found = msgspec.convert(ended["statistics"], DataStatistics)
    used = np.concatenate([rows[lab.devices.index(name)] for name in ("strong-0", "weak-0")])
    x = dataset.train_x[used].astype(np.float32) * np.float32(dataset.scale) + np.float32(dataset.shift)
    assert found.devices is not None and (found.devices.devices, found.devices.rows) == (2, len(used))
    assert found.devices.classes == tuple(np.bincount(dataset.train_y[used], minlength=10).tolist())
    assert found.devices.mean == pytest.approx([x.mean(dtype=np.float64)], abs=1e-8)
    assert found.devices.deviation == pytest.approx([x.std(dtype=np.float64)], abs=1e-8)
    assert not (lab.folder / "model.safetensors").exists()


def test_the_command_asks_the_devices_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(tmp_path)
    monkeypatch.chdir(tmp_path)  # of the server and the devices, too
    file = tmp_path / "federation.toml"
    file.write_text(
        '[federation]\nname = "asked"\n[data]\nname = "digits"\ntrain_samples = 60\n[model]\nname = "mlp"\n'
        "[tiers.strong]\ncount = 1\n"
    )
    told = runner().invoke(
        app,
        [
            "statistics",
            str(file),
            "--ask",
            "classes,histogram",
            "--edges",
            "0,1,2",
            "--devices",
            "1",
            "--json",
        ],
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["devices"]["rows"] == sum(found["devices"]["classes"]) == 60
    assert sum(map(sum, found["devices"]["histogram"])) == 60 * 64
    assert not found["devices"]["mean"]
