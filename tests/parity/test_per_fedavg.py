"""Per-FedAvg's graphs on each engine, every mode of them, and whole rounds on the device runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.resnet import resnet8
from edgefl.models.zoo.transformer import vit
from edgefl.objective.derivatives import hvp
from edgefl.objective.objective import Objective
from edgefl.objective.parts import step_ports
from edgefl.submodels import catalog
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data.samples import Batches
from edgefl_export.compiler.compiler import target_of
from tests.invariants.embracingfl.tiny import tiny
from tests.pairs import in_turn, pairs, slow
from tests.parity.forms import checked
from tests.parity.rounds import Exported, local_data, on_device
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

BATCH, STEPS = 4, 3
HF, EXACT = {"mode": "hf"}, {"mode": "exact"}
ABSOLUTE = {"mode": "hf", "delta": 1e-2}
TWICE = {"inner_steps": 2}
SHARED = {"hessian_batch": "inner"}


def shallow() -> ModelSpec:
    """One hidden layer: a step of the exact mode holds each layer several times."""
    return mlp(size=4, hidden=(5,), seed=1)


def elu_net() -> ModelSpec:
    """Dense layers with smooth activations between them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Flatten(), nn.Linear(36, 9), nn.ELU(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 10)]
    return ModelSpec("elu_net", sequential([("net", nn.Sequential(*layers))]), TensorSpec((1, 6, 6)), 10)


def model(name: str) -> ModelSpec:
    if name in ("elu_net", "shallow"):
        return elu_net() if name == "elu_net" else shallow()
    if name == "resnet8 group":
        return resnet8(size=8, widths=(8, 8, 16), norm="gn", groups=4, seed=1)
    return tiny(name)


def check(form: str, algorithm: Algorithm, *names: str) -> None:
    for function in algorithm.functions:
        if not names or function.name in names:
            checked(form, function, 0)


FORMS: list[dict[str, Any]] = [HF, ABSOLUTE, EXACT]
GRID: list[dict[str, Any]] = [{"mode": "fo"}, {"mode": "fo"} | TWICE]
GRID += [form | more | batch for form in FORMS for more in ({}, TWICE) for batch in ({}, SHARED)]
QUICK = [HF]


@pytest.mark.parametrize(
    ("options", "form"), in_turn(QUICK, rare=[each for each in GRID if each not in QUICK])
)
def test_every_step_is_the_same_on_the_engine(options: dict[str, Any], form: str) -> None:
    check(form, per_fedavg(Objective.of(OutputSide(shallow(), 0)), batch=BATCH, **options), "train")


@pytest.mark.parametrize(
    ("model_name", "options", "form"),
    in_turn([], rare=[("elu_net", ABSOLUTE), ("elu_net", EXACT), ("cnn", EXACT | TWICE)]),
)
def test_so_is_that_of_other_models(model_name: str, options: dict[str, Any], form: str) -> None:
    check(form, per_fedavg(Objective.of(OutputSide(model(model_name), 0)), batch=BATCH, **options), "train")


@pytest.mark.parametrize(("model_name", "form"), in_turn(["shallow"], rare=["mlp", "cnn"]))
def test_so_is_every_other_function(model_name: str, form: str) -> None:
    algorithm = per_fedavg(Objective.of(OutputSide(model(model_name), 0)), batch=BATCH, mode="fo")
    names = [function.name for function in algorithm.functions]
    assert names == ["start", "train", "finish", "evaluate", "personalize"]
    check(form, algorithm, "start", "finish", "evaluate", "personalize")


@pytest.mark.parametrize(
    ("kind", "options", "mode", "form"),
    [
        slow(*submodel, mode, form)
        for submodel, mode, form in pairs(
            [
                ("output_side", {"cut": 2}),
                ("width", {"ratio": 0.5, "scaler": True}),
                ("importance", {"gamma": 0.4}),
                ("importance_structured", {"gamma": 0.5}),
            ],
            ["hf", "exact"],
            ["onnx", "executorch"],
        )
    ],
)
def test_so_is_the_step_of_every_kind(kind: str, options: dict[str, Any], mode: str, form: str) -> None:
    objective = Objective.of(catalog.build(tiny("mlp"), kind, **options))
    check(form, per_fedavg(objective, batch=BATCH, mode=mode), "start", "train", "finish")


class Gated(nn.Module):
    """A dense layer, and GLU."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(36, 14)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.dense(x.flatten(1)))


@pytest.mark.parametrize(("model_name", "form"), in_turn(["gated"], rare=["cnn", "elu_net", "resnet8 group"]))
def test_a_product_by_itself_is_the_same_on_the_engine(model_name: str, form: str) -> None:
    """In a step it is multiplied by two small numbers, so that a wrong one would hardly show."""
    if model_name == "gated":
        units = sequential([("gated", Gated()), ("head", nn.Linear(7, 10))])
        spec = ModelSpec("gated", units, TensorSpec((1, 6, 6)), 10)
    else:
        spec = model(model_name)
    objective = Objective.of(OutputSide(spec, 0))

    def fn(tensors: Tensors) -> Tensors:
        weights, along = select(tensors, "state.weights"), select(tensors, "state.along")
        return prefixed("update", hvp(objective, weights, tensors, along))

    along = {name: objective.weights[name] for name in objective.trainable}
    ports = step_ports(objective, BATCH) | prefixed("state.along", along)
    function = Function("product", fn, ports, spec.classes)
    checked(form, function, 0)


@pytest.mark.parametrize("form", in_turn([()]))
def test_a_layer_without_second_derivative_is_refused_with_a_remedy(form: str) -> None:
    algorithm = per_fedavg(Objective.of(OutputSide(tiny("lstm_lm"), 0)), batch=BATCH, **EXACT)
    with pytest.raises(ModelError, match=r"jvp.*mode 'hf'"):
        target_of(form).capture(algorithm.phases[0].function)


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_so_are_exact_products_through_attention_and_layer_norm(form: str) -> None:
    spec = vit(size=8, patch=4, width=8, depth=1, heads=2, classes=5)
    check(form, per_fedavg(Objective.of(OutputSide(spec, 0)), batch=BATCH, **EXACT), "train")


@pytest.mark.parametrize("form", in_turn([()], formats=("executorch", "onnx")))
def test_batches_of_three_sizes_are_three_ports(form: str) -> None:
    algorithm = per_fedavg(
        Objective.of(OutputSide(shallow(), 0)), batch=6, inner_batch=4, hessian_batch_size=3, mode="exact"
    )
    step = algorithm.phases[0].function
    assert [step.inputs[f"batch.{stream}.x"].shape[0] for stream in range(3)] == [6, 4, 3]
    check(form, algorithm, "train")


def exported(form: str, spec: ModelSpec, **options: Any) -> Exported:
    submodel = OutputSide(spec, 0)
    algorithm = per_fedavg(Objective.of(submodel), batch=BATCH, steps=STEPS, **({"lr": 0.05} | options))
    data = DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes)
    bundle = build_bundle(
        algorithm,
        tuple(name for name, _ in submodel.suffix.named_children()),
        model=spec.name,
        data=data,
        format=form,
    )
    return Exported(spec, submodel, algorithm, (), bundle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_name", "samples", "options", "form"),
    in_turn(
        [("mlp", 21, {"mode": "fo"}), ("mlp", BATCH - 1, EXACT)],
        rare=[
            ("mlp", 21, HF | TWICE),
            ("mlp", 21, EXACT | {"inner_batch": 3, "hessian_batch_size": 6}),
            ("cnn", 21, HF | {"lr": 0.005}),  # it runs away at ten times that
            ("resnet8", 21, EXACT),
        ],
    ),
)
def test_a_round_on_the_device_is_the_round_in_torch(
    tmp_path: Path, model_name: str, samples: int, options: dict[str, Any], form: str
) -> None:
    tier = exported(form, tiny(model_name), alpha=0.1, **options)
    data = local_data(tier.spec, samples, seed=5)

    found = on_device(tier, data, 11, tmp_path, form)[0].update

    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)

    def feed(function: Function, step: int) -> Tensors:
        given: Tensors = {}
        for name in function.inputs:
            if role_of(name) == "batch":
                _, stream, part = name.split(".")
                batches = Batches(11, samples, function.inputs[name].shape[0], "draw")
                rows = torch.from_numpy(batches.indices(int(stream), step))
                given[name] = (x if part == "x" else y)[rows]
        return given

    weights = {name: tensor.clone() for name, tensor in tier.spec.weights.items()}
    expected = run_round(tier.algorithm, weights, feed).update
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max()))
        assert np.abs(found[name] - value.numpy()).max() <= 2e-4 * scale, name
