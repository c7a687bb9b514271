"""A whole round on the device runtime equals the same round in torch."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.models.exits import ExitSpec, early_exits, with_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as kinds
from edgefl.submodels.early_exit.submodel import EarlyExit
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data.samples import Batches, LabelSpec
from edgefl_export.compiler.compiler import target_of
from tests.invariants.embracingfl.tiny import tiny
from tests.pairs import FORMATS, by_default, in_both, in_turn
from tests.parity.forms import checked, engine_of
from tests.parity.rounds import by_unit, device_round, exported, in_torch, local_data, on_device
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

BATCH, STEPS, LR = 8, 4, 0.05


@pytest.mark.parametrize(
    ("model", "cut", "chunks", "form"),
    in_turn(
        [("mlp", 0, 1), ("cnn", 2, 2), ("lstm_lm", 1, 1), ("mlp", 2, 2)],
        rare=[
            ("cnn", 0, 1),
            ("resnet8", 0, 1),
            ("resnet8", 3, 2),
            ("resnet8 static", 2, 1),
            ("lstm_lm", 0, 1),
        ],
        every=3,
    ),
)
def test_a_device_round_equals_torch(tmp_path: Path, model: str, cut: int, chunks: int, form: str) -> None:
    tier = exported(OutputSide(tiny(model), cut, chunks), batch=BATCH, steps=STEPS, lr=LR, form=form)
    data = local_data(tier.spec, 21, seed=5)

    result, _ = on_device(tier, data, 11, tmp_path, form)

    expected = in_torch(tier, data, 11)
    assert result.update.keys() == expected.keys() == set(tier.submodel.holds)
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max()))
        assert np.abs(result.update[name] - value.numpy()).max() <= 1e-4 * scale, name


# -- scaleFL on devices ------------------------------------------------------------------------------------


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
def test_a_device_round_of_a_level_equals_torch(
    tmp_path: Path, width: float, kd_weight: float, form: str
) -> None:
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


# -- every function of every algorithm beside torch, on each engine ----------------------------------------


NETS = {"mlp": {"size": 4, "hidden": (5,)}, "fedbat_cnn": {"size": 4, "widths": (3, 4)}}
WITH_EXITS = {"multi_exit"}
WITH_BATCH_NORM = ("fedbat", "multi_exit", "per_fedavg", "scaffold", "swat")
CASES = [(name, "fedbat_cnn" if name in {*WITH_EXITS, "fedbn"} else "mlp") for name in ALGORITHMS]
RARE = [(name, "fedbat_cnn") for name in WITH_BATCH_NORM if name not in WITH_EXITS]
"""An MLP has no place for exits. Batch norm and pooling have tests of their own, so few algorithms need both nets."""
ROWS = [(name, net, form) for (name, net), form in product(CASES, FORMATS)]
ROWS += [(name, net, form) for (name, net), form in zip(RARE, FORMATS * len(RARE), strict=False)]
DEFAULT = [
    ("sgd", "mlp", "onnx"),
    ("naive_adaptive", "mlp", "executorch"),
    ("multi_exit", "fedbat_cnn", "onnx"),
    ("binary", "mlp", "executorch"),
    ("fedavg_update", "mlp", "onnx"),
]
"""The slow ring has all. In the default ring the steps of FedProx, SCAFFOLD, Per-FedAvg, FAFED, SWAT, AdamW, local AMSGrad,
MimeAdam and FedBAT's ``finish`` are compared by tests of their own."""
OPTIONS: dict[str, dict[str, float]] = {"sgd": {"personal": 0.1}, "multi_exit": {"kd_weight": 0.3}}


def submodel(name: str, net: str) -> Submodel:
    if name in WITH_EXITS:
        return kinds.build(early_exits(base=net, classes=3, **NETS[net]), "early_exit", exit=2)
    return kinds.build(build_model(net, classes=3, seed=1, **NETS[net]), "output_side", cut=0)


def functions(algorithm: Algorithm) -> dict[tuple[int, str], Function]:
    """By exchange and name: one that several phases or exchanges share is there once."""
    found = {id(each): (at, each) for at, part in enumerate(algorithm.exchanges) for each in part.functions}
    return {(at, function.name): function for at, function in found.values()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "net", "form"), by_default(ROWS, DEFAULT))
def test_every_function_of_every_algorithm_equals_torch(name: str, net: str, form: str) -> None:
    objective = Objective.of(submodel(name, net))
    algorithm = algorithms.build(name, objective, batch=4, steps=3, **OPTIONS.get(name, {}))

    reports = {place: checked(form, function, seed=2) for place, function in functions(algorithm).items()}

    assert len(reports) >= 4  # start, a step, finish, evaluate
    for place, report in reports.items():
        assert not report.rounding or name == "swat", (place, report.rounding)
