"""`edgefl.statistics` with three kinds of agents: each adds the sums that Python's runtime computes of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.lab.agents import CPP_VARIABLE
from edgefl.wire.bundle.archive import read_bundle
from edgefl_device.data.sources import load as load_data
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from tests.agents.cpp.build import program
from tests.agents.web.fleet import require_browser
from tests.e2e.runs import TINY


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
def test_devices_of_three_kinds_report_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_browser()
    monkeypatch.setenv(CPP_VARIABLE, str(program("edgefl-agent")))
    file, folder = tmp_path / "federation.toml", tmp_path / "run"
    file.write_text(
        TINY.replace('"e2e"', '"summed"') + "".join(f"[tiers.{tier}]\ncount = 1\n" for tier in "abc")
    )

    found = edgefl.statistics(
        file, folder, edges=(0.0, 0.5, 1.0), devices=3, agents={"python": 1, "cpp": 1, "web": 1}
    )

    assert found.devices is not None and found.devices.devices == 3
    total: dict[str, np.ndarray] = {}
    for tier in "abc":
        bundle = read_bundle(next((folder / "bundles").glob(f"{tier}*statistics*")))
        (device,) = (folder / "devices").glob(f"{tier}*")
        result = train_round(bundle, {}, load_data(device / "data.npz"), open_engine("onnx"))
        total = {name: total.get(name, 0) + array for name, array in result.update.items()}
    assert found.sums == {name: array.tolist() for name, array in total.items()}
