"""Statistics of static batch norm after training, and submodels on their own that they are frozen into."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.losses import CROSS_ENTROPY
from edgefl.models.modes import mark_inference
from edgefl.models.spec import ModelSpec
from edgefl.models.torch_functions.rules import RewriteMode
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.standalone import scores, standalone
from edgefl.submodels.statistics import StatisticsMode, collect, freeze, norms, unknown_statistics, use_batch
from edgefl.wire.tensors import Arrays
from tests.support.errors import DataError, ModelError, refuses


def small(bn: str = "static") -> ModelSpec:
    return resnet8(size=8, widths=(4, 6, 8), classes=5, bn=bn, seed=3)


def trained(spec: ModelSpec) -> Arrays:
    """Weights that stand for those of a training."""
    rng = np.random.default_rng(6)
    return {
        name: (tensor.numpy() + 0.3 * rng.standard_normal(tensor.shape)).astype(np.float32)
        if "running" not in name
        else tensor.numpy() + 0.5
        for name, tensor in spec.weights.items()
    }


def batches(count: int, rows: int = 8, seed: int = 0) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": 1 + 2 * torch.randn((rows, 1, 8, 8), generator=generator)} for _ in range(count)]


def images(seed: int = 0) -> Tensor:
    return batches(1, seed=seed)[0]["x"]


def with_torch_norms(module: nn.Sequential) -> nn.Sequential:
    """The same model with torch's batch norms, which keep a cumulative average."""
    made = copy.deepcopy(module)
    for path, norm in norms(made).items():
        own = nn.BatchNorm2d(norm.channels, eps=norm.eps, momentum=None)
        own.weight, own.bias = norm.weight, norm.bias
        made.set_submodule(path, own)
    return made


def test_they_are_the_cumulative_averages_of_torch() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    reference = with_torch_norms(module).train()
    for batch in batches(5):
        reference(batch["x"])

    made = freeze(module, collect(module, batches(5)))

    assert len(norms(module)) == 10 and not norms(made)
    for path in norms(module):
        found, right = made.get_submodule(path), reference.get_submodule(path)
        torch.testing.assert_close(found.running_mean, right.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.running_var, right.running_var, rtol=1e-4, atol=1e-5)
    x = images(seed=9)
    torch.testing.assert_close(made(x), reference.eval()(x), rtol=1e-4, atol=1e-4)


def test_the_sums_of_clients_are_those_of_all_their_batches() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    every = batches(6)
    clients = [every[:1], every[1:4], every[4:]]

    together, apart = collect(module, every), sum(collect(module, own) for own in clients)

    x = images(seed=9)
    assert apart != 0 and apart.passes == together.passes  # type: ignore[union-attr]
    torch.testing.assert_close(freeze(module, apart)(x), freeze(module, together)(x))  # type: ignore[arg-type]


def test_frozen_statistics_make_an_image_s_logits_its_own() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    x = images()
    made = freeze(module, collect(module, batches(3)))

    torch.testing.assert_close(made(x[:1]), made(x)[:1])
    assert not torch.allclose(module(x[:2])[:1], module(x)[:1], atol=1e-3), "batches had no say before"


def test_collecting_changes_nothing() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    collect(module, batches(2))
    freeze(module, collect(module, batches(2)))
    assert {name: True for name in before} == {
        name: torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items()
    }
    assert not any(norm._forward_pre_hooks for norm in norms(module).values())


def test_moving_statistics_stay_unless_they_are_collected() -> None:
    spec = small("global")
    weights = trained(spec)
    module = standalone(OutputSide(spec, 0), weights)
    made = freeze(module, collect(module, batches(2)))
    assert not norms(module) and len(norms(module, moving=True)) == 10
    for path, part in norms(made, moving=True).items():
        np.testing.assert_array_equal(part.running_mean.numpy(), weights[f"{path}.running_mean"])


def test_collected_moving_norms_equal_static_ones() -> None:
    weights = trained(small("global"))
    shared = {name: array for name, array in weights.items() if "running" not in name}
    moving = standalone(catalog.build(small("global"), "importance", gamma=0.3), weights)
    static = standalone(catalog.build(small(), "importance", gamma=0.3), shared)

    made = freeze(moving, collect(moving, batches(3), moving=True))

    right = freeze(static, collect(static, batches(3))).state_dict()
    assert made.state_dict().keys() == right.keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, right[name]), name
    np.testing.assert_array_equal(
        moving.get_buffer("stem.bn.running_mean").numpy(), weights["stem.bn.running_mean"]
    )


def test_a_norm_whose_statistics_training_left_alone_keeps_them() -> None:
    model = nn.Sequential(BatchNorm(1), nn.BatchNorm2d(1).eval())
    mark_inference(model)
    module = copy.deepcopy(model).eval()
    assert list(norms(module, moving=True)) == ["0"]
    made = freeze(module, collect(module, batches(2), moving=True))
    assert torch.equal(made.get_buffer("1.running_mean"), torch.zeros(1))
    assert not torch.equal(made.get_buffer("0.running_mean"), torch.zeros(1))


def test_torch_s_norms_get_statistics_and_lose_them() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(1, track_running_stats=False)).eval()
    x = images()

    right = copy.deepcopy(module).train()(x)
    torch.testing.assert_close(use_batch(module)(x), right)
    assert list(norms(module)) == ["1"] and list(norms(module, moving=True)) == ["0", "1"]

    made = freeze(module, collect(module, [{"x": x}], moving=True))
    torch.testing.assert_close(
        made(x), right, rtol=1e-2, atol=1e-2
    )  # the unbiased variance is a little larger
    torch.testing.assert_close(made[0].running_mean, x.mean((0, 2, 3)))


def test_by_batch_moving_norms_normalise_like_static_ones() -> None:
    weights = trained(small("global"))
    shared = {name: array for name, array in weights.items() if "running" not in name}
    module = use_batch(standalone(OutputSide(small("global"), 0), weights))
    x = images()
    assert torch.equal(module(x), standalone(OutputSide(small(), 0), shared)(x))


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "F.batch_norm": lambda x, mean, var, training: F.batch_norm(
        x, mean, var, training=training, momentum=1.0
    ),
    "batch_norm": lambda x, mean, var, training: torch.batch_norm(
        x, None, None, mean, var, training, 1.0, 1e-5, cudnn_enabled=False
    ),
    "native_batch_norm": lambda x, mean, var, training: torch.native_batch_norm(
        x, None, None, mean, var, training, 1.0, 1e-5
    )[0],
    "F.instance_norm": lambda x, mean, var, training: F.instance_norm(
        x, mean, var, use_input_stats=training, momentum=1.0
    ),
    "instance_norm": lambda x, mean, var, training: torch.instance_norm(
        x, None, None, mean, var, training, 1.0, 1e-5, False
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_function_of_torch_is_recognized_and_moves_as_in_torch(name: str) -> None:
    x, call = images(), CALLS[name]
    right = {"mean": torch.zeros(1), "var": torch.ones(1)}
    out = call(x, *right.values(), True)

    estimated, moved = ({"mean": torch.zeros(1), "var": torch.ones(1)} for _ in range(2))
    with StatisticsMode(estimated) as recording:
        torch.testing.assert_close(call(x, *estimated.values(), False), out)
    torch.testing.assert_close(recording.total.averages, right)
    with RewriteMode():
        torch.testing.assert_close(call(x, *moved.values(), True), out)
    torch.testing.assert_close(moved, right)


class ByHand(nn.Module):
    """Moves its statistics without any function of torch that normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("constant", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.center.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return (x - self.center) * self.constant


def test_statistics_that_a_model_computes_by_hand_are_named() -> None:
    torch.manual_seed(0)
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 1, 3))
    module = nn.Sequential(
        nn.BatchNorm2d(1), ByHand(), nn.InstanceNorm2d(1, track_running_stats=True), nn.Dropout(), conv
    )
    random = torch.get_rng_state()
    assert unknown_statistics(module, batches(1)[0]) == ("1.center",)
    assert torch.equal(module[1].center, torch.zeros(1)) and torch.equal(torch.get_rng_state(), random)


def test_without_a_batch_there_are_none() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    with pytest.raises(DataError, match=r"at least one row of data .* found none"):
        collect(module, [])


def test_statistics_of_another_model_are_refused() -> None:
    module = standalone(OutputSide(small(), 0), trained(small()))
    with refuses(DataError, norm="stem.bn"):
        freeze(module, collect(nn.Sequential(), batches(1)))


# -- submodels on their own ------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "gamma"),
    [("importance", 0.003), ("importance", 0.37), ("importance", 1.0), ("width", 0.04), ("width", 0.37)],
)
def test_a_submodel_of_any_size_computes_what_its_devices_compute(kind: str, gamma: float) -> None:
    spec, weights = small(), trained(small())
    submodel = catalog.build(spec, kind, gamma=gamma)
    x = images()

    objective = Objective.of(submodel)
    local = {
        name: torch.from_numpy(array)
        for name, array in (submodel.place(weights, 1).payload or weights).items()
    }
    held, gates = objective.carrier.unpack(local)
    assert torch.equal(standalone(submodel, weights)(x), objective.predict(held, x, gates))


def test_ordered_dropout_does_not_reach_inference() -> None:
    spec, weights = build_model("cnn", size=8, classes=5), None
    weights = trained(spec)
    x = images()
    plain = standalone(catalog.build(spec, "width", gamma=0.25), weights)(x)
    ordered = catalog.build(spec, "width", gamma=0.25, ordered=True, widths=[0.25, 0.5])
    assert torch.equal(standalone(ordered, weights)(x), plain)


def test_a_frozen_input_side_makes_no_difference_to_inference() -> None:
    spec, weights = small(), trained(small())
    x = images()
    whole, weak = (standalone(OutputSide(spec, cut), weights) for cut in (0, 3))
    assert torch.equal(whole(x), weak(x))


def test_evaluation_never_writes_to_the_weights() -> None:
    spec, weights = small(), trained(small())
    before = {name: array.copy() for name, array in weights.items()}
    standalone(catalog.build(spec, "importance", gamma=0.1), weights).get_parameter(
        "stem.conv.weight"
    ).data.fill_(7)
    for name, array in before.items():
        np.testing.assert_array_equal(weights[name], array)


def test_weights_of_another_model_are_refused() -> None:
    spec = small()
    wrong = trained(spec)
    wrong["head.dense.weight"] = wrong["head.dense.weight"][:, :4]
    with refuses(ModelError, wrong=["head.dense.weight"]):
        standalone(OutputSide(spec, 0), wrong)


def test_scores_are_means_over_all_rows() -> None:
    module = nn.Sequential(nn.Identity())
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    y = torch.tensor([0, 0, 0])
    batches = [{"x": logits[rows], "y": y[rows]} for rows in (slice(2), slice(2, 3))]
    found = scores(module, CROSS_ENTROPY, batches)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)))
