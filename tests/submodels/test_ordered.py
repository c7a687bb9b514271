"""FjORD's ordered dropout: a step computes exactly what the sliced model of the drawn width computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors, select
from edgefl.models.losses import SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.ordered import NOISE
from edgefl.submodels.width.submodel import Width, width
from edgefl.wire.regions import BlockRegion, Region, extract
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.rings.rows import mostly_slow
from tests.submodels.nets import model, rows
from tests.support.errors import ModelError, refuses

WIDTHS = (0.25, 0.5, 0.75)


def small(bn: str = "static") -> ModelSpec:
    return resnet8(size=8, widths=(4, 6, 8), classes=5, bn=bn, seed=3)


@cache
def model_and_whole(name: str) -> tuple[ModelSpec, Submodel]:
    """A model, and all of it as a tier that drops channels."""
    if name == "resnet":
        spec = small()
    else:
        spec = build_model(
            name, **({"size": 8, "classes": 5} if name == "cnn" else {"size": 6, "hidden": (9, 7)})
        )
    return spec, width(spec, ratio=1.0, ordered=True, widths=WIDTHS)


def moved(spec: ModelSpec) -> Tensors:
    """Weights away from their initial values: norms with shifts, biases that are not zero."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: tensor if "running" in name else tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in spec.weights.items()
    }


def batch(spec: ModelSpec, count: int = 6) -> tuple[Tensor, Tensor]:
    x = rows(spec.sample, count)
    return x, torch.arange(count) % spec.classes


def gradients(
    objective: Objective, weights: Mapping[str, Tensor], x: Tensor, y: Tensor, draw: float | None = None
) -> tuple[Tensor, Tensors, Tensors]:
    """(loss, gradients, statistics after the pass) of a training step that draws ``draw``."""
    params = {name: weights[name].clone().requires_grad_() for name in objective.trainable}
    buffers = {name: weights[name] for name in objective.fixed}
    noise = {} if draw is None else {NOISE: torch.tensor(draw)}
    loss, _, after = objective(params, buffers, x, y, noise)
    found = torch.autograd.grad(loss, list(params.values()))
    return loss.detach(), dict(zip(params, found, strict=True)), after


def tensors(arrays: Mapping[str, np.ndarray]) -> Tensors:  # type: ignore[type-arg]
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def cut(values: Mapping[str, Tensor], regions: Mapping[str, Region]) -> Tensors:
    named = {name: values[name].numpy() for name in regions if name in values}
    return tensors(extract(named, {name: regions[name] for name in named}))


def inside(name: str, region: Region, shape: torch.Size) -> Tensor:
    held = torch.ones(math.prod(shape), dtype=torch.bool)
    if isinstance(region, BlockRegion):
        held[:] = False
        held[torch.from_numpy(region.positions(tuple(shape)))] = True
    return held.reshape(shape)


@settings(max_examples=6, deadline=None)
@given(
    draw=st.floats(0.0, 1.0, exclude_max=True, width=32),
    seed=st.integers(0, 99),
    name=st.sampled_from(["resnet", "cnn", "mlp"]),
)
def test_a_step_has_the_loss_and_the_gradient_of_the_sliced_model(draw: float, seed: int, name: str) -> None:
    spec, whole = model_and_whole(name)
    ratio = (*WIDTHS, 1.0)[int(np.float32(draw) * 4)]
    generator = torch.Generator().manual_seed(seed)
    weights = {
        key: value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in moved(spec).items()
    }
    x, y = batch(spec)
    sliced = Width(spec, ratio)
    regions = sliced.regions()

    loss, grads, _ = gradients(Objective.of(whole), weights, x, y, draw)
    expected, wanted, _ = gradients(Objective.of(sliced), cut(weights, regions), x, y)

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for key, gradient in cut(grads, regions).items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-5 * scale)
    for key, gradient in grads.items():
        assert not gradient[~inside(key, regions[key], gradient.shape)].any(), (
            f"{key} moves outside the width"
        )


def test_a_tier_draws_from_the_widths_up_to_its_own_and_ends_with_its_own() -> None:
    spec = model_and_whole("mlp")[0]
    half = width(spec, ratio=0.5, ordered=True)  # of the paper's list .2 and .4 lie below
    objective, (x, y) = Objective.of(half), batch(spec)
    local = cut(moved(spec), half.regions())
    expected = {}
    for ratio in (0.2, 0.4, 0.5):
        part = Width(spec, ratio)
        expected[ratio] = gradients(Objective.of(part), cut(moved(spec), part.regions()), x, y)[0]
    for draw, ratio in [(0.0, 0.2), (0.33, 0.2), (0.34, 0.4), (0.66, 0.4), (0.67, 0.5), (0.999, 0.5)]:
        loss = gradients(objective, local, x, y, draw)[0]
        torch.testing.assert_close(loss, expected[ratio], rtol=1e-5, atol=1e-6)


def test_every_width_comes_up_equally_often() -> None:
    objective = Objective.of(model_and_whole("mlp")[1])
    weight = "dense1.dense.weight"
    ones = {name: torch.ones(port.shape) for name, port in objective.weights.items()}
    kept = [
        int(
            objective.carrier.effective(ones, {}, {NOISE: torch.tensor(u / 400)}, training=True)[weight][
                :, 0
            ].sum()
        )
        for u in range(400)
    ]
    assert [kept.count(count) for count in (3, 5, 7, 9)] == [100] * 4


def test_inference_and_transport_use_the_whole_tier() -> None:
    spec = model_and_whole("resnet")[0]
    part = width(spec, ratio=0.75, ordered=True, widths=WIDTHS)
    plain = width(spec, ratio=0.75)
    local = cut(moved(spec), plain.regions())
    x, _ = batch(spec)

    torch.testing.assert_close(Objective.of(part).predict(local, x), Objective.of(plain).predict(local, x))
    assert part.regions() == plain.regions()


def test_moving_statistics_of_dropped_channels_rest() -> None:
    spec = small("global")
    whole, weights = width(spec, ratio=1.0, ordered=True, widths=WIDTHS), moved(spec)
    _, _, after = gradients(Objective.of(whole), weights, *batch(spec), draw=0.3)
    half = Width(spec, 0.5)
    _, _, wanted = gradients(Objective.of(half), cut(weights, half.regions()), *batch(spec))

    for name, statistic in after.items():
        held = inside(name, half.regions()[name], statistic.shape)
        torch.testing.assert_close(statistic[held], wanted[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(statistic[~held], weights[name][~held])


def test_self_distillation_is_fjord_s_loss() -> None:
    spec, whole = model_and_whole("resnet")
    weights, (x, y) = moved(spec), batch(spec)
    alpha, temperature = 0.7, 2.0
    algorithm = sgd(
        Objective.of(whole), batch=6, steps=1, lr=1.0, momentum=0.0, weight_decay=0.0,
        self_distillation=alpha, temperature=temperature,
    )  # fmt: skip
    half = Width(spec, 0.5)

    params = {name: weights[name].clone().requires_grad_() for name in Objective.of(whole).trainable}
    teacher = Objective.of(Width(spec, 1.0)).predict(params, x)  # static norms: as in training
    local = {
        name: params[name]
        .reshape(-1)[torch.from_numpy(region.positions(tuple(params[name].shape)))]
        .reshape(region.shape(tuple(params[name].shape)))
        if isinstance(region, BlockRegion)
        else params[name]
        for name, region in half.regions().items()
    }
    student = Objective.of(half).predict(local, x)
    soft = F.softmax(teacher.detach() / temperature, dim=1)
    kl = F.kl_div(F.log_softmax(student / temperature, dim=1), soft, reduction="batchmean")
    expected = F.cross_entropy(teacher, y) + (1 - alpha) * F.cross_entropy(student, y)
    expected = expected + alpha * temperature**2 * kl
    wanted = dict(zip(params, torch.autograd.grad(expected, list(params.values())), strict=True))

    fed = {f"state.weights.{name}": tensor for name, tensor in weights.items()}
    fed |= {
        "batch.0.x": x,
        "batch.0.y": y,
        "hyper.lr": torch.tensor(1.0),
        f"noise.{NOISE}": torch.tensor(0.3),
    }
    out = algorithm.phases[0].function(fed)
    torch.testing.assert_close(out["metric.loss"], expected.detach(), rtol=1e-5, atol=1e-6)
    for name, new in select(out, "state.weights").items():
        torch.testing.assert_close(weights[name] - new, wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    mostly_slow(
        [("resnet", {}), ("mlp", {"self_distillation": 1.0}), ("mlp", {"momentum": 0.0})],
        quick=[("mlp", {"self_distillation": 1.0})],
    ),
)
def test_a_step_exports_and_agrees_with_torch(name: str, options: dict[str, float]) -> None:
    step = sgd(Objective.of(model_and_whole(name)[1]), batch=4, **options).phases[0].function
    captured = capture(step)
    assert f"noise.{NOISE}" in captured.inputs
    verify(step, to_onnx(captured), seed=1)


@pytest.mark.parametrize("name", mostly_slow(["vit", "convnext"], ["vit"]))
def test_a_model_whose_parts_are_not_its_slices_is_refused(name: str) -> None:
    with refuses(ModelError, model=name, ratio=0.5, apart=...):
        width(model(name), ratio=1.0, ordered=True, widths=(0.5,))


def test_recurrent_layers_can_be_dropped_in_part() -> None:
    assert width(model("lstm_lm"), ratio=1.0, ordered=True, widths=(0.5,)).carrier is not None


@pytest.mark.parametrize(
    ("options", "details"),
    [
        ({"rolling": True}, {"other": "rolling"}),
        ({"scaler": True}, {"other": "scaler"}),
        ({"widths": [0.0, 0.5]}, {"widths": ...}),
        ({"widths": []}, {"widths": ...}),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], details: dict[str, object]) -> None:
    with refuses(ModelError, **details):
        catalog.build(small(), "width", ratio=0.5, ordered=True, **options)


@pytest.mark.parametrize(
    ("options", "details"),
    [
        ({"self_distillation": 1.5}, {"weight": 1.5}),
        ({"self_distillation": 1.0, "temperature": 0.0}, {"temperature": 0.0}),
    ],
)
def test_distillation_by_impossible_numbers_is_refused(
    options: dict[str, float], details: dict[str, object]
) -> None:
    with refuses(ModelError, **details):
        sgd(Objective.of(model_and_whole("mlp")[1]), **options)


def test_distillation_needs_a_loss_over_classes() -> None:
    objective = Objective.of(model_and_whole("mlp")[1])
    with pytest.raises(ModelError, match="need logits of classes, and SquaredError reads none"):
        sgd(replace(objective, loss=SquaredError()), self_distillation=1.0)
