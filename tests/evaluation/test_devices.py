"""The evaluation bundle on a device: the same sums as torch on the same rows, for each engine and kind of tier."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch

from edgefl.algorithms.evaluation import EVALUATE, evaluation
from edgefl.config import Federation, parse
from edgefl.contract.tensors import select
from edgefl.data.dataset import Dataset
from edgefl.data.datasets import digits
from edgefl.setup.bundles import bundle_of
from edgefl.setup.model import federation_model
from edgefl.setup.training import tier_of
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.metrics import add_sums, compute_metrics
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from edgefl_device.data.samples import LocalData, fit_rows, is_held_out
from edgefl_device.engine import open_engine
from edgefl_device.round.inputs import RoundInputs
from edgefl_device.round.offline import train_round
from edgefl_export.compiler.request import Exchange, TierTraining
from edgefl_server.device_evaluation import SCALE

TIERS = {
    "whole": {},
    "cut": {"kind": "output_side", "cut": 1},
    "half": {"kind": "width", "gamma": 0.5},
    "important": {"kind": "importance", "gamma": 0.5},
}
ROWS = 70


def federation(model: str, algorithm: str = "sgd") -> Federation:
    tables = {name: {"count": 1, **table} for name, table in TIERS.items()}
    return parse(
        {
            "model": {"name": model},
            "data": {"name": "digits"},
            "algorithm": {"name": algorithm, "batch": 8, "steps": 2},
            "evaluate": {"split": 0.4, "every": 1},
            "tiers": tables if algorithm == "sgd" else {"whole": tables["whole"]},
        },
        source="the test",
    )


@cache
def data() -> Dataset:
    return digits()


def tier_and_bundle(model: str, tier: str, format: str) -> tuple[TierTraining, BundleArchive, Arrays]:
    made = federation(model)
    spec = federation_model(made, data())
    trained = tier_of(made, spec, tier)
    exchange = Exchange(EVALUATE, evaluation(trained.algorithm), ())
    bundle = bundle_of(made, data(), trained, exchange, format=format).bundle
    weights = {name: tensor.numpy() for name, tensor in trained.submodel.spec.weights.items()}
    return trained, bundle, weights


def sums_by_torch(trained: TierTraining, bundle: BundleArchive, weights: Arrays, local: LocalData) -> Arrays:
    """Return the sums of the held-out rows, by the tier's own functions in torch and a split that is made again here."""
    whole = local.fitted(bundle.manifest.data)
    at = np.flatnonzero(is_held_out(whole, 0.4, 0))
    x: torch.Tensor = torch.from_numpy(whole.rows(at))
    for chunk in trained.prefix:
        spec = chunk.forward.inputs["batch.0.x"]
        parts = []
        for first in range(0, len(x), spec.shape[0]):
            rows = torch.arange(first, first + spec.shape[0]) % len(x)
            fed = {
                name: torch.from_numpy(weights[name.removeprefix("weights.")])
                for name in chunk.forward.inputs
                if name.startswith("weights.")
            }
            parts.append(chunk.forward({**fed, "batch.0.x": x[rows]})["record.x"][: len(x) - first])
        x = torch.cat(parts)
    evaluate, total = trained.algorithm.evaluate, {}
    placed = trained.submodel.place(weights, 1)
    share = placed.payload or extract(weights, placed.regions)
    fed = {f"weights.{name}": torch.from_numpy(np.asarray(array)) for name, array in share.items()}
    fed = {name: tensor for name, tensor in fed.items() if name in evaluate.inputs}
    rows = evaluate.inputs["batch.0.x"].shape[0]
    for first in range(0, len(x), rows):
        at_once = torch.arange(first, first + rows)
        mask = (at_once < len(x)).float()
        batch = {
            "batch.0.x": x[at_once % len(x)],
            "batch.0.y": torch.from_numpy(whole.labels(at))[at_once % len(x)],
        }
        found = select(evaluate({**fed, **batch, "batch.0.mask": mask}), "metric")
        total = add_sums(total, {name: value.numpy() for name, value in found.items()})
    return total


@pytest.mark.parametrize("format", ["onnx", "executorch"])
@pytest.mark.parametrize("tier", TIERS)
def test_the_sums_of_the_held_out_rows_equal_torchs(tier: str, format: Literal["onnx", "executorch"]) -> None:
    if format == "executorch":
        pytest.importorskip("executorch")
    trained, bundle, weights = tier_and_bundle("mlp", tier, format)
    local = LocalData(data().train_x[:ROWS], data().train_y[:ROWS], "digits")
    placed = trained.submodel.place(weights, 1)
    share = {**weights, **placed.payload}

    result = train_round(bundle, share, local, open_engine(format))

    expected = sums_by_torch(trained, bundle, weights, local)
    assert result.samples == int(expected["count"])
    assert all(array.dtype == np.int64 for array in result.update.values())
    assert result.carry == {} and result.metrics == {}
    for name, value in expected.items():
        if name == "loss_sum":
            assert result.update[name] / SCALE == pytest.approx(value, rel=1e-4)
        else:
            assert np.array_equal(result.update[name], value * SCALE), name
    names = bundle.manifest.graph(bundle.manifest.evaluate).metrics
    known = [name for name in names if name != "loss"]
    device = compute_metrics(known, {name: array / SCALE for name, array in result.update.items()})
    assert device == pytest.approx(compute_metrics(known, expected), abs=1e-4)


def test_a_training_bundle_of_the_run_never_sees_a_held_out_row() -> None:
    made = federation("mlp")
    trained = tier_of(made, federation_model(made, data()), "whole")
    bundle = bundle_of(made, data(), trained, trained.main).bundle
    local = LocalData(data().train_x[:ROWS], data().train_y[:ROWS], "digits")
    held = {row.tobytes() for row in local.x[is_held_out(local.fitted(bundle.manifest.data), 0.4, 0)]}
    rows = fit_rows(local, bundle.manifest)
    inputs = RoundInputs.for_round(bundle.manifest, 5, rows, {}, None)
    graph = bundle.manifest.graph(bundle.manifest.phases[0].graph)
    scale, shift = bundle.manifest.data.scale, bundle.manifest.data.shift
    seen = set()
    for step in range(40):
        batch = inputs.batch(graph, step)["batch.0.x"]
        stored = np.rint((batch - shift) / scale).astype(local.x.dtype)
        seen |= {row.tobytes() for row in stored}
    assert len(seen) == len(rows) and not seen & held
    assert len(seen) + len(held) == len({row.tobytes() for row in local.x})


@pytest.mark.parametrize("format", ["onnx", "executorch"])
def test_a_device_with_private_layers_evaluates_its_own_model(format: Literal["onnx", "executorch"]) -> None:
    if format == "executorch":
        pytest.importorskip("executorch")
    made = federation("mlp", "fedper")
    trained = tier_of(made, federation_model(made, data()), "whole")
    bundles = [
        bundle_of(made, data(), trained, exchange, format=format).bundle
        for exchange in (trained.main, Exchange(EVALUATE, evaluation(trained.algorithm), ()))
    ]
    weights = {name: tensor.numpy() for name, tensor in trained.submodel.spec.weights.items()}
    local = LocalData(data().train_x[:ROWS], data().train_y[:ROWS], "digits")
    training = train_round(bundles[0], weights, local, open_engine(format), hyper={"lr": 0.5})
    own = {
        name.removeprefix("private."): array for name, array in training.carry.items() if "private." in name
    }
    assert own and not own.keys() & training.update.keys()

    first = train_round(bundles[1], weights, local, open_engine(format))
    after = train_round(bundles[1], weights, local, open_engine(format), carry=training.carry)

    for found, held in ((first, {}), (after, own)):
        expected = sums_by_torch(trained, bundles[1], {**weights, **held}, local)
        assert found.update["loss_sum"] / SCALE == pytest.approx(expected["loss_sum"], rel=1e-4)
        assert np.array_equal(found.update["correct"], expected["correct"] * SCALE)
    assert first.update["loss_sum"] != after.update["loss_sum"]
    assert after.carry == {}, "the device keeps what it has"
