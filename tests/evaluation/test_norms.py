"""Statistics of batch norm that devices measure: the rounds, the sums, the server's result, the agreement of accuracies."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import edgefl
from edgefl.config import Federation, parse
from edgefl.contract.tensors import Tensors, prefixed
from edgefl.data.dataset import Dataset
from edgefl.data.datasets import digits
from edgefl.errors import UpdateRejected
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.lab.run_folder import MeasuredStatistics, measured_statistics
from edgefl.setup.bundles import bundle_of
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.norm_statistics import NormMeasurement, norm_measurement
from edgefl.setup.training import tier_of
from edgefl.submodels.standalone import standalone
from edgefl.wire.norm_statistics import NORM_BITS, WHOLE
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from edgefl_server.aggregate.integer_sums import DeviceSums, SumBlocks
from edgefl_server.coordinator.states import EVALUATION, MEASURING, EvaluationSchedule
from edgefl_server.norm_statistics import NormFamilies
from edgefl_server.norm_statistics import measured_statistics as statistics_of
from edgefl_server.publish.model import group_by_unit
from tests.pairs import FORMATS
from tests.rings.rows import mostly_slow

TIERS = {
    "half": {"kind": "width", "gamma": 0.5, "count": 2},
    "few": {"kind": "importance", "gamma": 0.3, "count": 2},
    "late": {"kind": "output_side", "cut": 2, "count": 1},
    "deep": {"kind": "output_side", "cut": 0, "count": 1},
}
SPLIT, SEED = 0.3, 5


def federation(bn: str, rounds: int = 1, **more: object) -> Federation:
    return parse(
        {
            "federation": {"rounds": rounds, "seed": SEED},
            "model": {"name": "resnet8", "bn": bn, "options": {"widths": [16, 32]}},
            "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
            "algorithm": {"batch": 16, "steps": 8, "lr": 0.1},
            "evaluate": {"split": SPLIT, "every": max(1, rounds)},
            "tiers": TIERS,
            **more,
        },
        source="the test",
    )


# -- the rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "rounds", "measuring"),
    [(5, 10, [6, 13]), (5, 12, [6, 13, 17]), (1, 3, [2, 5, 8]), (7, 3, [4]), (0, 3, [])],
)
def test_each_evaluation_follows_a_measuring_round(every: int, rounds: int, measuring: list[int]) -> None:
    schedule = EvaluationSchedule(every, extra=4, measures=True)
    planned, numbers = schedule.planned_rounds(rounds), range(1, schedule.last_round(rounds) + 1)
    found = {
        number: schedule.position(number, rounds) for number in numbers if schedule.includes(number, rounds)
    }

    measuring = [*measuring, planned + 1, planned + 3]
    assert [number for number, position in found.items() if position == MEASURING] == measuring
    assert [number for number, position in found.items() if position == EVALUATION] == [
        each + 1 for each in measuring
    ]
    training = [number for number in numbers if number not in found]
    assert [schedule.trained(number, rounds) for number in training] == list(range(1, rounds + 1))
    assert {schedule.trained(number, rounds) for number in range(planned, planned + 5)} == {rounds}


@pytest.mark.parametrize(
    ("ended", "begun", "more", "extra"),
    [
        (0, 0, False, 0),
        (0, 0, True, 2),
        (0, 1, False, 2),  # killed while devices measured
        (0, 1, True, 2),
        (1, 1, False, 2),  # killed between the two rounds
        (1, 1, True, 2),
        (1, 2, False, 2),  # killed while devices evaluated
        (1, 2, True, 2),
        (2, 2, False, 2),
        (2, 2, True, 4),
    ],
)
def test_an_evaluation_that_was_killed_is_completed_once(
    ended: int, begun: int, more: bool, extra: int
) -> None:
    schedule = EvaluationSchedule(every=2, measures=True)
    assert schedule.continued(ended, begun, more=more).extra == extra


# -- the sums of a device ------------------------------------------------------------------------------------


@cache
def data() -> Dataset:
    return digits()


@cache
def measurement(bn: str) -> NormMeasurement:
    found = norm_measurement(federation(bn), federation_model(federation(bn), data()))
    assert found is not None
    return found


def moments_by_torch(module: nn.Module, x: torch.Tensor, batch: int) -> dict[str, torch.Tensor]:
    """Return the mean and the mean square over all rows of what enters each batch norm, which normalises by its batch."""
    sums: dict[str, torch.Tensor] = {}

    def replaced(name: str, norm: nn.Module) -> None:
        def forward(rows: torch.Tensor) -> torch.Tensor:
            dims = (0, 2, 3)
            for key, moment in (("running_mean", rows.mean(dims)), ("running_var", rows.square().mean(dims))):
                sums[f"{name}.{key}"] = sums.get(f"{name}.{key}", 0) + moment.double() * len(rows) / len(x)
            mean, var = rows.mean(dims, keepdim=True), rows.var(dims, correction=0, keepdim=True)
            shape = (1, -1, 1, 1)
            weight, bias = norm.weight.reshape(shape), norm.bias.reshape(shape)
            return (rows - mean) / (var + norm.eps).sqrt() * weight + bias

        norm.forward = forward

    for name, part in module.named_modules():
        if type(part).__name__ == "BatchNorm":
            replaced(name, part)
    with torch.no_grad():
        for first in range(0, len(x), batch):
            module(x[first : first + batch])
    return sums


@pytest.mark.parametrize(
    ("tier", "format"),
    mostly_slow(
        product(["half", "few", "deep"], FORMATS), [("half", "executorch"), ("few", "onnx"), ("deep", "onnx")]
    ),
)
def test_a_device_measures_the_moments_of_its_submodel(tier: str, format: str) -> None:
    made, spec = federation("static"), federation_model(federation("static"), data())
    trained = tier_of(made, spec, tier)
    bundle = bundle_of(made, data(), trained, measurement("static").measure[tier], format=format).bundle
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    rows = data().train_x[:53]
    placed = trained.submodel.place(weights, 1)

    result = train_round(
        bundle,
        dict(placed.payload) or weights,
        LocalData(rows, data().train_y[:53], "r"),
        open_engine(format),
    )

    held_out = np.array([is_held_out(row) for row in data().read(rows)])
    x = torch.from_numpy(data().read(rows)[~held_out])
    module = standalone(trained.submodel, weights)
    expected = moments_by_torch(module, x, bundle.manifest.pass_rows(bundle.manifest.phases[0]))
    assert result.samples == len(x) == int(result.update["rows"])
    assert result.update.keys() == {"rows", *expected}
    for name, moment in expected.items():
        wanted = moment if name.endswith("mean") else (moment - expected[mean_of(name)] ** 2).sqrt()
        found = result.update[name] / 2.0**NORM_BITS
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def mean_of(variance: str) -> str:
    return variance.replace("running_var", "running_mean")


def test_features_of_a_large_scale_fit() -> None:
    measure = measurement("static").measure["deep"].algorithm
    mean, rows = next(name for name in measure.finish.inputs if name.endswith("mean")), 500
    sums = {
        name: torch.full(spec.shape, rows * (1e6 if name.endswith("mean") else 1e12 + 1e8), dtype=spec.dtype)
        for name, spec in measure.finish.inputs.items()
    } | {"state.sum.rows": torch.tensor(float(rows), dtype=torch.float64)}
    found = {name.removeprefix("update."): array for name, array in measure.finish(sums).items()}

    name = mean.removeprefix("state.sum.")
    assert int(found["rows"]) == rows
    np.testing.assert_allclose(found[name] / 2.0**NORM_BITS, 1e6)
    np.testing.assert_allclose(
        found[name.replace("running_mean", "running_var")] / 2.0**NORM_BITS, 1e4, rtol=1e-6
    )


def is_held_out(row: np.ndarray) -> bool:
    digest = hashlib.sha256(SEED.to_bytes(8, "little") + np.ascontiguousarray(row).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") < int(SPLIT * 2**64)


# -- the exchanges of unusual federations --------------------------------------------------------------------

WIDTH = {"kind": "width", "gamma": 0.5, "count": 1}


def measured(tiers: dict[str, object], **more: object) -> NormMeasurement:
    made = federation("static", tiers=tiers, **more)
    found = norm_measurement(made, federation_model(made, data()))
    assert found is not None
    return found


def test_a_dot_in_a_tiers_name_separates_nothing() -> None:
    found = measured({"low": WIDTH, "low.end": WIDTH})

    norms = NormFamilies(found.families, found.variances)
    units = group_by_unit(found.initial, norms.units)
    assert [len(own) for own in units.values()] == [2 * len(found.variances) + 1] * 2


@pytest.mark.parametrize("cut", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_that_no_tier_measures_have_initial_values(cut: int) -> None:
    found = measured({"late": {"cut": cut, "count": 1}, "half": WIDTH})

    exchange = found.evaluate["late"]
    functions = [*exchange.algorithm.functions, *(chunk.forward for chunk in exchange.prefix or ())]
    read = {port.removeprefix("weights.") for function in functions for port in function.inputs}
    statistics = {name for name in read if name.startswith("norms/")}
    assert statistics and statistics <= found.initial.keys()
    norms = NormFamilies(found.families, found.variances)
    assert group_by_unit(found.initial, norms.units).keys() == set(norms.units)


def test_a_tier_without_norms_needs_no_statistics() -> None:
    norms = NormFamilies({"half": "half"}, NORMS.variances)

    assert norms.covers("plain", {}, 3)
    assert statistics_of(norms, [report("plain", 3, 0.0, 1.0)], {}, 3, CAP) == {}


@pytest.mark.parametrize("private", ["stem", pytest.param("stem.conv", marks=pytest.mark.slow)])
def test_a_device_measures_the_model_with_its_private_layers(private: str) -> None:
    algorithm = {"name": "fedper", "private": private, "batch": 16}
    found = measured({"whole": {"count": 1}}, algorithm=algorithm)
    made = federation("static", tiers={"whole": {"count": 1}}, algorithm=algorithm)
    spec = federation_model(made, data())
    trained, measure = tier_of(made, spec, "whole").algorithm, found.measure["whole"].algorithm
    own = {name: tensor + 0.5 for name, tensor in spec.weights.items() if name in trained.private}

    def sums(weights: Tensors, begun: float) -> Tensors:
        carry = prefixed("carry.private", own) | {"carry.begun": torch.tensor(begun)}
        inputs = prefixed("weights", weights) | carry
        state = measure.start({name: inputs[name] for name in measure.start.inputs})
        x = torch.from_numpy(data().read(data().train_x[:16]))
        batch = {"x": x, "y": torch.zeros(16, dtype=torch.int64), "mask": torch.ones(16)}
        known = state | prefixed("batch.0", batch)
        step = measure.phases[0].function
        return step({name: known[name] for name in step.inputs})

    stored, expected = sums(spec.weights, 1.0), sums({**spec.weights, **own}, 0.0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())
    assert any(not torch.equal(tensor, sums(spec.weights, 0.0)[name]) for name, tensor in stored.items())
    carried = {name for name in measure.start.inputs if name.startswith("carry.")}
    assert carried <= trained.start.inputs.keys()


# -- the server ----------------------------------------------------------------------------------------------

NORMS = NormFamilies({"weak": "weak", "deep": WHOLE, "late": WHOLE}, {"b.running_var": "b.running_mean"})
KEPT: Arrays = {
    f"norms/{family}.{name}": np.zeros(shape, np.float32)
    for family in ("weak", WHOLE)
    for name, shape in {"measured": (), "b.running_mean": (2,), "b.running_var": (2,)}.items()
}


CAP = 4.0


def report(
    tier: str, rows: int, mean: float, square: float, channels: tuple[int, int] = (1, 1)
) -> DeviceSums:
    arrays = {
        "rows": np.array(rows, np.int64),
        "b.running_mean": np.array(channels) * round(mean * 2**NORM_BITS),
        "b.running_var": np.array(channels) * round((square - mean**2) ** 0.5 * 2**NORM_BITS),
    }
    shapes = {name: array.shape for name, array in arrays.items()}
    blocks = SumBlocks(DENSE, {}, shapes, tuple(shapes), (), np.zeros(0, np.int64), 5, 0)
    return DeviceSums.check_norms(arrays, blocks, tier, rows)


def test_the_moments_of_all_rows_give_mean_and_variance() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size, 1 + size, 40 * size) for size in (1, 2, 3)]
    reports = [report("weak", len(each), float(each.mean()), float(np.square(each).mean())) for each in parts]

    found, again = (statistics_of(NORMS, order, KEPT, 7, CAP) for order in (reports, reports[::-1]))

    whole = np.concatenate(parts)
    np.testing.assert_allclose(found["norms/weak.b.running_mean"], whole.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["norms/weak.b.running_var"], whole.var(), rtol=1e-5)
    assert float(found["norms/weak.measured"]) == 7
    assert all(array.tobytes() == again[name].tobytes() for name, array in found.items())
    assert not any(name.startswith(f"norms/{WHOLE}") for name in found)  # no device of these tiers reported
    assert NORMS.covers("weak", {**KEPT, **found}, 7)
    assert not NORMS.covers("weak", {**KEPT, **found}, 8) and not NORMS.covers("late", {**KEPT, **found}, 7)


@pytest.mark.parametrize(("rows", "most"), [(20, 1.5), (1 << 20, 3.0)])
def test_one_device_cannot_move_the_statistics_at_will(rows: int, most: float) -> None:
    honest = [report("weak", 20, 0.5, 1.25) for _ in range(4)]

    found = statistics_of(NORMS, [*honest, report("weak", rows, 1e4, 1e9)], KEPT, 1, CAP)

    assert np.all((found["norms/weak.b.running_var"] > 1) & (found["norms/weak.b.running_var"] < 16 * 1.25))
    assert np.all(np.abs(found["norms/weak.b.running_mean"]) < most)


def test_a_feature_that_few_devices_have_keeps_its_variance() -> None:
    others = [report("weak", 20, 0.5, 1.25, channels=(1, 0)) for _ in range(2)]

    found = statistics_of(NORMS, [report("weak", 20, 0.5, 1.25), *others], KEPT, 1, CAP)

    np.testing.assert_allclose(found["norms/weak.b.running_var"], [1.0, 1.25 / 3 - 0.5**2 / 9], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rows", 6, "wrong-sums"),
        ("b.running_var", 1 << 62, "not-finite"),
        ("b.running_mean", -(1 << 62), "not-finite"),
    ],
)
def test_moments_that_cannot_be_are_refused(name: str, value: int, reason: str) -> None:
    arrays = {**report("weak", 5, 0.0, 1.0).named}
    blocks = report("weak", 5, 0.0, 1.0).pieces
    arrays[name] = np.full_like(arrays[name], value)

    with pytest.raises(UpdateRejected) as refused:
        DeviceSums.check_norms(arrays, blocks, "weak", 5)

    assert refused.value.reason == reason


# -- deployment ----------------------------------------------------------------------------------------------

WIDTHS = {
    "heterofl": {"scaler": True},
    "fedrolex": {"rolling": True},
    "fjord": {"ordered": True, "widths": [0.25, 0.5]},
    "plain": {},
}


@pytest.mark.parametrize(
    ("method", "bn"),
    mostly_slow(
        product(WIDTHS, ["global", "static"]),
        [("heterofl", "global"), ("fedrolex", "static"), ("fjord", "global")],
    ),
)
def test_a_deployed_width_predicts_what_its_devices_evaluate(method: str, bn: str) -> None:
    tiers = {"half": {"kind": "width", "count": 1, "options": {"ratio": 0.5, **WIDTHS[method]}}}
    made = federation(bn, tiers=tiers)
    spec = federation_model(made, data())
    found, trained = norm_measurement(made, spec), tier_of(made, spec, "half")
    assert found is not None
    rng = np.random.default_rng(1)
    weights = {
        name: tensor.numpy() + 0.1 * rng.random(tensor.shape, np.float32)
        for name, tensor in spec.weights.items()
    }
    statistics = {
        name.removeprefix("norms/half."): np.abs(array + rng.random(array.shape, np.float32))
        for name, array in found.initial.items()
        if not name.endswith(".measured")
    }
    rounds, rows = 3, np.arange(found.evaluate["half"].algorithm.evaluate.inputs["batch.0.mask"].shape[0])
    batch = {name: torch.from_numpy(array) for name, array in data().test_batch(rows).items()}

    payload = trained.submodel.place(weights, rounds + 1).payload
    read = payload | {f"norms/half.{name}": array for name, array in statistics.items()}
    inputs = {f"weights.{name}": torch.from_numpy(array) for name, array in read.items()}
    inputs |= {f"batch.0.{name}": tensor for name, tensor in batch.items()} | {
        "batch.0.mask": torch.ones(len(rows))
    }
    evaluate = found.evaluate["half"].algorithm.evaluate
    sums = evaluate.fn({name: inputs[name] for name in evaluate.inputs})

    measured = MeasuredStatistics(rounds, {"half": statistics})
    deployment = DeploymentBuilder.of(made, data(), weights, batch=len(rows), measured=measured).deployment(
        trained.submodel
    )
    session = ort.InferenceSession(deployment.artifact.model)
    logits = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: batch["x"].numpy()})[0])
    loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
    assert deployment.facts["statistics"] == {"source": "devices"}
    assert loss.item() == pytest.approx(float(sums["metric.loss_sum"]), rel=1e-5)
    assert int(logits.argmax(1).eq(batch["y"]).sum()) == int(sums["metric.correct"])


# -- the agreement -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bn", ["global", pytest.param("static", marks=pytest.mark.slow)])
def test_reported_and_deployed_accuracy_agree_without_rows_on_the_server(tmp_path: Path, bn: str) -> None:
    one = dataclasses.replace(data(), test_x=data().test_x[:1], test_y=data().test_y[:1])
    one.save(tmp_path / "data.npz")
    table = {"name": "file", "file": str(tmp_path / "data.npz"), "partition": "dirichlet", "alpha": 0.5}
    made = federation(bn, rounds=6, data=table)

    done = edgefl.simulate(made, out=tmp_path / "s")

    rows = [(row.measures, row.evaluation is not None) for row in done.history]
    assert rows == [*[(False, False)] * 6, (True, False), (False, True)]
    evaluated = done.history[-1].evaluation
    assert evaluated is not None and evaluated.left_out == () and evaluated.trained_rounds == 6
    known = measured_statistics(tmp_path / "s" / "model.safetensors", made)
    assert known is not None and known.by_family.keys() == {"half", "few", WHOLE}
    dataset, names = (
        open_data(made),
        [name for name, table in TIERS.items() for _ in range(int(str(table["count"])))],
    )
    x, parts = dataset.read(dataset.train_x), partition(made, dataset, len(names))
    held_out = np.array([is_held_out(row) for row in x])
    for tier, group in evaluated.tiers.items():
        own = np.concatenate([part for part, name in zip(parts, names, strict=True) if name == tier])
        own = own[held_out[own]]
        deployment = edgefl.deploy(done, tier=tier, options=edgefl.DeployOptions(dynamic_batch=True))
        assert deployment.facts["statistics"] == {"source": "devices"}
        session = ort.InferenceSession(deployment.artifact.model)
        logits = session.run(None, {session.get_inputs()[0].name: x[own]})[0]
        assert group.rows == len(own)
        assert group.metrics["accuracy"] == pytest.approx(
            np.mean(logits.argmax(1) == dataset.train_y[own]), abs=0.01
        )
        assert group.metrics["accuracy"] > 0.5, tier
