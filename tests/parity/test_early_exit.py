"""ScaleFL on devices: every exported function beside torch, and whole rounds of a deep and of a narrow level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.contract.algorithm import Function
from edgefl.models.exits import ExitSpec, with_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.early_exit.submodel import EarlyExit
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data.samples import Batches, LabelSpec
from edgefl_export.compiler.compiler import target_of
from tests.invariants.embracingfl.tiny import tiny
from tests.pairs import in_both, in_turn
from tests.parity.forms import checked, engine_of
from tests.parity.rounds import by_unit, device_round, local_data
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

NAME = "tier/submodel"


@pytest.mark.parametrize(
    ("exit", "width", "kd_weight", "form"),
    [*in_both(1, 1.0, 0.3), *in_turn([], rare=[(2, 0.5, 0.0), (3, 1.0, 0.3), (3, 0.3, 0.3)])],
)
def test_every_function_of_a_level_equals_torch(exit: int, width: float, kd_weight: float, form: str) -> None:
    assert _worst_error(form, EarlyExit(_spec(), exit, width), kd_weight) <= 1e-4


@pytest.mark.parametrize(
    ("model", "options", "form"),
    in_turn(
        [],
        rare=[
            ("vit", {"size": 8, "width": 12, "depth": 2}),
            ("lstm_lm", {"length": 5, "vocabulary": 20, "features": 6, "hidden": 5}),
        ],
    ),
)
def test_exits_on_tokens_export_too(model: str, options: dict[str, int], form: str) -> None:
    assert _worst_error(form, EarlyExit(with_exits(build_model(model, **options)), 2), 0.3) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_inference_does_not_compute_the_exits_before_the_last(form: str) -> None:
    algorithm = multi_exit(Objective.of(EarlyExit(_spec(), 3)), batch=4)
    unused = target_of(form).capture(algorithm.evaluate).unused
    assert {name.split(".")[1] for name in unused} == {"block1_exit", "block2_exit"}


@pytest.mark.parametrize(("width", "kd_weight", "form"), in_turn([], rare=[(1.0, 0.0), (0.5, 0.4)]))
def test_a_device_round_equals_torch(tmp_path: Path, width: float, kd_weight: float, form: str) -> None:
    level = EarlyExit(_spec(), 2, width)
    algorithm = multi_exit(Objective.of(level), batch=8, steps=3, lr=0.05, kd_weight=kd_weight)
    fetched = level.units or (NAME,)
    bundle = build_bundle(
        algorithm,
        fetched,
        model="resnet8",
        data=DataSpec(shape=level.spec.sample.shape, dtype="float32", classes=level.spec.classes),
        format=form,
    )
    data = local_data(level.spec, 21, seed=5).fitted(bundle.manifest.data, LabelSpec.of(bundle.manifest))
    hyper = {"kd_weight": 0.2} if kd_weight else {}
    initial = {name: tensor.numpy() for name, tensor in level.spec.weights.items()}
    payload = level.place(initial, 1).payload
    contents = dict.fromkeys(fetched, tensors.dump(payload)) if payload else by_unit(initial, fetched)
    made = device_round(bundle, contents, engine_of(form), tmp_path, seed=11, hyper=hyper)

    update = made.run(data, {}).update

    batches = Batches(11, len(data), bundle.manifest.batch)

    def feed(_: Function, step: int) -> dict[str, Tensor]:
        rows = batches.indices(0, step)
        return {"batch.0.x": torch.from_numpy(data.rows(rows)), "batch.0.y": torch.from_numpy(data.y[rows])}

    weights = {name: tensor.clone() for name, tensor in level.suffix.state_dict().items()}
    expected = run_round(algorithm, weights, feed, hyper=hyper).update
    assert update.keys() == expected.keys() == level.regions.keys()
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max()))
        assert np.abs(update[name] - value.numpy()).max() <= 1e-4 * scale, name


def _worst_error(form: str, level: EarlyExit, kd_weight: float) -> float:
    algorithm = multi_exit(Objective.of(level), batch=4, kd_weight=kd_weight)
    return max(checked(form, fn, 3).worst for fn in algorithm.functions)


def _spec() -> ExitSpec:
    return with_exits(tiny("resnet8"))
