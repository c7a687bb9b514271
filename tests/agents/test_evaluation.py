"""`edgefl run --agents` with held-out rows: each kind of agent reports the sums of Python's runtime on its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import edgefl
from edgefl.algorithms.evaluation import EVALUATE, evaluation
from edgefl.config import load
from edgefl.lab.agents import CPP_VARIABLE
from edgefl.setup.bundles import bundle_of
from edgefl.setup.data import open_data
from edgefl.setup.model import data_spec, federation_model
from edgefl.setup.training import tier_of
from edgefl.wire import tensors
from edgefl_device.data.samples import is_held_out
from edgefl_device.data.sources import load as load_data
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from edgefl_export.compiler.request import Exchange
from edgefl_server.aggregate.integer_sums import SCALE
from tests.agents.cpp.build import program
from tests.agents.web.fleet import require_browser
from tests.e2e.runs import TINY, run_to_the_end

TIERS = ("first", "second", "third")
CONFIG = (
    TINY.replace('"e2e"', '"evaluated"\nrounds = 1').replace("train_samples = 90", "train_samples = 240")
    + "[evaluate]\nsplit = 0.3\nevery = 1\n"
    + "".join(f"[tiers.{tier}]\ncount = 1\n" for tier in TIERS)
)


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
def test_devices_of_three_kinds_report_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_browser()
    monkeypatch.setenv(CPP_VARIABLE, str(program("edgefl-agent")))
    folder = tmp_path / "run"

    trained, evaluated = run_to_the_end(folder, ["--agents", "python:1,cpp:1,web:1", "--seed", "3"], CONFIG)

    assert (trained["reports"], evaluated["reports"], trained["evaluation"]) == (3, 3, None)
    found = evaluated["evaluation"]
    federation = load(tmp_path / "run.toml", {"federation.seed": 3})
    dataset = open_data(federation)
    weights, total = tensors.load((folder / "model.safetensors").read_bytes()), dict[str, int]()
    for tier in TIERS:
        training = tier_of(federation, federation_model(federation, dataset), tier)
        exchange = Exchange(EVALUATE, evaluation(training.algorithm), ())
        bundle = bundle_of(federation, dataset, training, exchange).bundle
        (device,) = (folder / "devices").glob(f"{tier}*")
        result = train_round(bundle, weights, load_data(device / "data.npz"), open_engine("onnx"))
        sums = {name: int(array) for name, array in result.update.items() if not array.shape}
        group = found["tiers"][tier]
        assert 0 < result.samples < 80
        assert group["rows"] == result.samples == sums["count"] / SCALE
        assert group["metrics"]["accuracy"] == sums["correct"] / sums["count"]
        assert group["metrics"]["loss"] == pytest.approx(sums["loss_sum"] / sums["count"], rel=1e-4)
        total = {name: total.get(name, 0) + value for name, value in sums.items()}
    assert (found["sums"]["correct"], found["sums"]["count"]) == (total["correct"], total["count"])


NORMS = {
    "first": 'kind = "width"\ngamma = 0.5\n',
    "second": 'kind = "importance"\ngamma = 0.3\n',
    "third": "cut = 0\n",
}
"""A tier of each kind, for an agent of each kind."""


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
def test_devices_of_three_kinds_measure_batch_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_browser()
    monkeypatch.setenv(CPP_VARIABLE, str(program("edgefl-agent")))
    folder = tmp_path / "run"
    config = (
        TINY.replace('"e2e"', '"normed"\nrounds = 4')
        .replace('name = "mlp"\noptions = { hidden = [8] }', 'name = "resnet8"')
        .replace("train_samples = 90", "train_samples = 900")
        + "[evaluate]\nsplit = 0.3\nevery = 4\n"
        + "".join(f"[tiers.{tier}]\ncount = 1\n{table}" for tier, table in NORMS.items())
    )

    *_, measured, evaluated = run_to_the_end(
        folder, ["--agents", "python:1,cpp:1,web:1", "--seed", "3"], config
    )

    assert (measured["measures"], measured["reports"], evaluated["reports"]) == (True, 3, 3)
    assert evaluated["evaluation"]["left_out"] == []
    dataset = open_data(load(tmp_path / "run.toml", {"federation.seed": 3}))
    for tier, group in evaluated["evaluation"]["tiers"].items():
        deployment = edgefl.deploy(folder, tier=tier, options=edgefl.DeployOptions(dynamic_batch=True))
        assert deployment.facts["statistics"] == {"source": "devices"}
        (device,) = (folder / "devices").glob(f"{tier}*")
        local = load_data(device / "data.npz").fitted(data_spec(dataset))
        rows = np.flatnonzero(is_held_out(local, 0.3, 3))
        session = ort.InferenceSession(deployment.artifact.model)
        logits = session.run(None, {session.get_inputs()[0].name: local.rows(rows)})[0]
        assert group["rows"] == len(rows)
        assert group["metrics"]["accuracy"] == pytest.approx(
            np.mean(logits.argmax(1) == local.y[rows]), abs=0.01
        )
