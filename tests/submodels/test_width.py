"""Width slices of any model: how much stays, that it trains and exports, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.basic import bilstm
from edgefl.models.zoo.resnet import resnet8, resnet18
from edgefl.objective.objective import Objective
from edgefl.submodels.cost import macs
from edgefl.submodels.width.submodel import Width, channels_of, width
from edgefl.wire.regions import BlockRegion, pieces
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.rings.rows import mostly_slow
from tests.submodels.nets import (
    IMAGE,
    MODELS,
    Encoder,
    Grey,
    HeadSized,
    Kept,
    Sorted,
    Written,
    model,
    rows,
    whole,
)
from tests.support.arrays import as_tensors, weights_of
from tests.support.errors import ModelError, refuses
from tests.support.reference import run_round
from tests.support.regions import assert_inside

# r, fraction of the maskable parameters, fraction of the multiplications (fiarse.md 3 and 8).
FRACTIONS = [
    (1 / 8, 0.0157, 0.0160),
    (1 / 4, 0.0626, 0.0631),
    (1 / 2, 0.2502, 0.2508),
    (0.2, 0.0408, 0.0416),
    (0.4, 0.1612, 0.1640),
    (0.6, 0.3622, 0.3654),
    (0.8, 0.6420, 0.6488),
]


@pytest.fixture(scope="module")
def whole18() -> ModelSpec:
    return resnet18()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "parameters", "multiplications"), mostly_slow(FRACTIONS, [FRACTIONS[0], FRACTIONS[5]])
)
def test_resnet18_keeps_the_fractions_of_the_spec(
    whole18: ModelSpec, ratio: float, parameters: float, multiplications: float
) -> None:
    part = Width.of_gamma(whole18, ratio**2)
    maskable = [name for name in whole18.weights if "bn" not in name]
    local = part.suffix.state_dict()
    kept, every = (sum(state[name].numel() for name in maskable) for state in (local, whole18.weights))
    assert every == 11_164_362
    assert round(kept / every, 4) == parameters
    cost = macs(part.suffix, part.boundary) / macs(whole18.module, whole18.sample)
    assert round(cost, 4) == multiplications


def test_the_analysis_of_a_model_is_made_once() -> None:
    fresh = resnet18()
    found = channels_of(fresh)
    assert channels_of(fresh) is found


# Every other model; the slices of tests/submodels/test_structured.py are made of those between them.
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", mostly_slow(MODELS[::2], ("cnn", "lstm_lm", "Grouped", "Uneven")))
def test_a_slice_of_any_model_loads_its_payload_and_trains(name: str) -> None:
    spec = model(name)
    arrays = weights_of(spec)
    x = rows(spec.sample)
    for ratio in (0.3, 0.5):
        part = Width(spec, ratio)
        placement = part.place(arrays, 1)
        assert_inside(placement.regions, {name: array.shape for name, array in arrays.items()})
        local = as_tensors(placement.payload)
        part.suffix.load_state_dict(local, strict=True)
        assert _count(local) < 0.75 * _count(spec.weights)
        with torch.no_grad():
            assert part.suffix.eval()(x).shape == spec.module.eval()(x).shape

    objective = Objective.of(part)
    update = run_round(algorithms.build("sgd", objective, batch=4, steps=1), local, _feed(objective)).update

    assert {key: tensor.shape for key, tensor in update.items()} == {
        key: tensor.shape for key, tensor in local.items()
    }
    assert any(not torch.equal(update[key], local[key]) for key in objective.trainable)


@pytest.mark.parametrize(
    ("name", "rolling"),
    mostly_slow(
        [
            *(("resnet8", False), ("mobilenet", True), ("ResNet", False)),
            *(("Dense", True), ("Shuffled", False), ("mlp", True)),
        ],
        quick=[("Shuffled", False), ("mlp", True)],
    ),
)
def test_a_slice_is_the_model_without_the_other_channels(name: str, rolling: bool) -> None:
    """Where no norm looks across channels: all entries outside the slice are 0, the shifts of batch norm too."""
    spec = model(name)
    part = Width(spec, 0.5, rolling=rolling)
    arrays = weights_of(spec)
    placement = part.place(arrays, 3)
    without = {}
    for key, region in placement.regions.items():
        held = np.zeros(arrays[key].size, bool)
        held[region.positions(arrays[key].shape) if isinstance(region, BlockRegion) else slice(None)] = True
        # Where mean, scale and shift of a norm are 0, any variance but 0 will do.
        empty = 1.0 if key.endswith("running_var") else 0.0
        without[key] = np.where(held.reshape(arrays[key].shape), arrays[key], np.float32(empty))
    x = rows(spec.sample)

    with torch.no_grad():
        spec.module.load_state_dict(as_tensors(without))
        part.suffix.load_state_dict(as_tensors(placement.payload))
        expected, found = spec.module.eval()(x), part.suffix.eval()(x)

    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(["resnet8", "vit", "bilstm", "mlp"], ["mlp"]))
def test_the_exported_step_of_a_slice_equals_torch(name: str) -> None:
    algorithm = algorithms.build("sgd", Objective.of(Width(model(name), 0.5)), batch=4)
    step = algorithm.phases[0].function
    assert verify(step, to_onnx(capture(step)), seed=3).worst <= 1e-4


@pytest.mark.parametrize(
    "name", mostly_slow(["vit", "Bert", "Encoder", "HeadSized", "Grouped", "bilstm"], ["Grouped", "bilstm"])
)
def test_a_narrower_slice_lies_in_a_wider_one(name: str) -> None:
    spec = model(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in spec.weights.items()}
    held = [Width(spec, ratio).regions() for ratio in (0.2, 0.3, 0.45, 0.7, 0.9, 1.0)]
    for inner, outer in pairwise(held):
        for key in shapes:
            few, many = (next(pieces(key, regions[key], shapes))[1] for regions in (inner, outer))
            assert many is None or (few is not None and set(few) <= set(many))


def test_a_window_rolls_by_one_channel_a_round_and_wraps_around() -> None:
    part = Width(resnet8(size=8, widths=(4, 6, 8)), 0.5, rolling=True)
    windows = [part.regions(number)["block2.conv1.weight"] for number in (1, 2, 5, 7)]
    assert windows[0] == BlockRegion((range(3), range(2), None, None))
    assert windows[1] == BlockRegion((range(1, 4), range(1, 3), None, None))
    assert windows[2] == BlockRegion(((4, 5, 0), range(2), None, None))
    assert windows[3] == BlockRegion((range(3), range(2, 4), None, None))
    head = part.regions(7)["head.dense.weight"]
    assert head == BlockRegion((None, (6, 7, 0, 1))), "classes do not roll"
    assert part.regions(7)["stem.conv.weight"] == BlockRegion((range(2, 4), None, None, None)), (
        "nor does the input"
    )


def test_every_channel_is_trained_once_the_windows_have_gone_round() -> None:
    part = Width(resnet8(size=8, widths=(4, 6, 8)), 0.25, rolling=True)
    held = {part.regions(number)["block3.bn1.weight"].axes[0] for number in range(1, 9)}
    assert {index for axis in held for index in axis} == set(range(8))


def test_rounding_forgives_floats_and_leaves_at_least_one() -> None:
    spec = resnet8(size=8, widths=(100, 10, 10))
    up, down = Width(spec, 0.29), Width(spec, 0.29, "floor")
    assert (up.keep(100), down.keep(100)) == (29, 29)
    assert (Width(spec, 0.07).keep(100), up.keep(10), down.keep(10), down.keep(1)) == (7, 3, 2, 1)
    assert Width(spec, 0.01, "floor").suffix.state_dict()["head.dense.weight"].shape == (10, 1)
    assert down.boundary.shape == (1, 8, 8)


def test_sizes_that_code_takes_for_each_other_stay_equal() -> None:
    """Torch's own attention reshapes its heads to the width of its input."""
    spec = whole(Encoder())
    local = Width(spec, 0.3).suffix.state_dict()
    # 0.3 of 8 is 3, but two heads of ceil(0.3 * 4) entries are 4.
    names = {name.rpartition("layer.")[2]: tuple(tensor.shape) for name, tensor in local.items()}
    assert names["self_attn.in_proj_weight"] == (12, 4) and names["norm1.weight"] == (4,)
    assert names["linear1.weight"] == (5, 4)


def test_code_that_knows_a_heads_size_loses_heads() -> None:
    part = Width(whole(HeadSized()), 0.5)
    held = part.regions()["all.q.weight"]
    assert held == BlockRegion((range(6), range(4))), "two heads of three entries, not four of two, scrambled"


def test_a_size_written_in_code_is_refused_with_its_line_and_the_remedy() -> None:
    part = Width(whole(Written()), 0.5)
    with pytest.raises(ModelError, match=r"(?s)unit 'all'.*nets\.py:\d+.*x\.shape") as caught:
        _ = part.suffix
    assert caught.value.details["ratio"] == 0.5


def test_sizes_that_code_keeps_in_attributes_follow() -> None:
    module = whole(Kept())
    part = Width(module, 0.5)
    made = part.suffix.get_submodule("all")
    assert (made.width, made.heads, made.entries) == (4, 2, 2)
    assert part.suffix.eval()(rows(IMAGE)).shape == (4, 5)
    original = module.module.get_submodule("all")
    assert (original.width, original.entries) == (8, 4), "the model itself stays"


def test_a_size_that_code_expands_to_stays_where_it_does_not_follow() -> None:
    part = Width(whole(Grey()), 0.5)
    regions = part.regions()
    assert regions["all.first.weight"] == BlockRegion((range(3), None, None, None))
    assert part.suffix.eval()(rows(IMAGE)).shape == (4, 5)


def test_a_size_written_in_a_graph_that_split_made_follows() -> None:
    spec = split(Written(), ["first"], sample=IMAGE, classes=5)
    assert Width(spec, 0.5).suffix.eval()(rows(IMAGE)).shape == (4, 5)


def test_what_cannot_be_is_refused_with_what_would_fit() -> None:
    with pytest.raises(ModelError, match=r"aten\.sort") as caught:
        Width(whole(Sorted()), 0.5)
    assert "all.first.weight" in caught.value.details["reasons"]
    spec = resnet8(size=8, widths=(4, 6, 8))
    with pytest.raises(ModelError, match=r"smallest ratio is 0\.125 \(gamma 0\.01562\)"):
        Width(spec, 0.1)
    with pytest.raises(ModelError, match=r"gamma lies in \(0, 1\], found 1\.5"):
        Width.of_gamma(spec, 1.5)
    with refuses(ModelError, ratio=...):
        Width(spec, float("nan"))
    with refuses(ModelError, ratio=0.5, gamma=0.25):
        width(spec, ratio=0.5, gamma=0.25)
    assert width(spec).ratio == 1
    with refuses(ModelError, rounding="round"):
        Width(spec, 0.5, "round")  # type: ignore[arg-type]
    assert width(spec, gamma=0.25).ratio == 0.5


class Ranked(nn.Module):
    """``inside`` channels whose order ``mix`` looks at, beside ``beside`` that no operation is unclear about."""

    def __init__(self, inside: int, beside: int, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.deep = nn.Linear(3, inside), nn.Linear(inside, inside)
        self.left, self.right = nn.Linear(3, beside), nn.Linear(beside, beside)
        self.head, self.other = nn.Linear(inside, 5), nn.Linear(beside, 5)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        ranked = self.mix(self.deep(self.mix(self.first(x))))
        return self.head(ranked) + self.other(torch.relu(self.right(torch.relu(self.left(x)))))


def _sort(x: Tensor) -> Tensor:
    return torch.sort(x, dim=1)[0]


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 16, 1 / 4, 0.36, 0.64])
def test_a_slice_that_keeps_far_more_than_asked_is_refused(gamma: float) -> None:
    spec = whole(Ranked(48, 12, _sort))
    with pytest.raises(
        ModelError, match=r"'all\.deep\.weight'.*aten\.sort.* in all at .*test_width"
    ) as caught:
        width(spec, gamma=gamma)
    message, details = caught.value.message, caught.value.details
    assert f"{100 * details['share']:.1f} %" in message
    assert "output_side or importance" in message
    assert details["gamma"] == pytest.approx(gamma)
    # 3 * 48 + 48, 48 * 48 + 48, 48 * 5 + 5 stay; 1 + 3, 1 + 1, 5 + 5 at least of the other branch of 3 * 12 + ...
    assert details["smallest"] == pytest.approx((192 + 2352 + 245 + 4 + 2 + 10) / (2789 + 48 + 156 + 65))
    assert details["smallest"] <= details["share"] <= 1.0
    assert gamma < details["fits"] <= 1.0
    assert f"smallest gamma that fits is {details['fits']:.2g}" in message
    assert width(spec, gamma=details["fits"]).suffix is not None
    assert next(iter(details["reasons"])) == "all.deep.weight", "the largest first"
    assert not any("left" in name or "right" in name for name in details["reasons"])


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        (lambda x: torch.cumsum(x, 1), "no rule says"),
        (lambda x: x.flip(1), r"entries change places \(aten\.flip"),
    ],
    ids=["cumsum", "flip"],
)
def test_other_operations_over_channels_are_named(mix: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(ModelError, match=told + r".*test_width\.py:\d+"):
        width(whole(Ranked(48, 12, mix)), ratio=0.25)


def test_a_few_tensors_that_stay_whole_do_not_refuse_a_slice() -> None:
    part = width(whole(Ranked(4, 48, _sort)), gamma=1 / 16)
    assert part.regions()["all.deep.weight"] is None
    assert _count(part.suffix.state_dict()) < 0.15 * _count(part.spec.weights)


class Padded(nn.Module):
    """A residual network that widens its shortcut by channels of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(3, 16), nn.Linear(16, 32)
        self.deep, self.head = nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.mean((2, 3))))
        x = torch.relu(self.wide(x)) + F.pad(x, (8, 8))
        return self.head(x + self.deep(x))


def test_channels_of_zeros_do_not_refuse_a_slice() -> None:
    part = width(whole(Padded()), gamma=1 / 64)
    assert part.suffix.state_dict()["all.deep.weight"].shape == (18, 18), "2 of 16 and all 2 * 8 zeros"


def test_words_of_which_all_stay_do_not_refuse_a_slice() -> None:
    part = width(bilstm(vocabulary=4000, features=64, hidden=8), gamma=1 / 64)
    assert _count(part.suffix.state_dict()) > 0.12 * _count(part.spec.weights)


def test_a_placement_is_a_pure_function_of_weights_and_round() -> None:
    spec = model("vit")
    arrays = weights_of(spec)
    one, other = (Width(spec, 0.5, rolling=True).place(arrays, 4) for _ in range(2))
    assert one.regions == other.regions
    assert all(one.payload[name].tobytes() == other.payload[name].tobytes() for name in one.payload)


def _count(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _feed(objective: Objective):
    def feed(function: Function, step: int) -> Tensors:
        example = function.example(step)
        return {name: tensor for name, tensor in example.items() if name.startswith(("batch", "noise"))}

    return feed
