"""The most important channels of any model: how many each layer keeps, which ones, and what that costs."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.catalog import build
from edgefl.submodels.channels.narrow import channels_of
from edgefl.submodels.channels.selection import leading
from edgefl.submodels.cost import cost as cost_of_submodel
from edgefl.submodels.cost import macs
from edgefl.submodels.cost import model_cost as cost_of_whole
from edgefl.submodels.structured.carrier import THETA
from edgefl.submodels.structured.counts import ChannelScore, cost_of, layouts, search, strongest_indices
from edgefl.submodels.structured.submodel import Structured, importance_structured
from edgefl.wire.regions import BlockRegion, extract
from tests.rings.rows import mostly_slow
from tests.submodels.nets import MODELS, model, rows
from tests.submodels.nets import whole as one_unit
from tests.support.arrays import as_tensors, weights_of
from tests.support.errors import ConfigError, ModelError, refuses
from tests.support.reference import run_round
from tests.support.regions import assert_inside


@cache
def resnet() -> ModelSpec:
    return model("resnet8")


def size(part: Structured) -> int:
    return sum(parameter.numel() for parameter in part.suffix.parameters())


# Every other model; the slices of tests/submodels/test_width.py are made of those between them.
@pytest.mark.parametrize("name", mostly_slow(MODELS[1::2], ("bilstm", "resnet8")))
def test_a_slice_of_any_model_loads_its_payload_and_trains(name: str) -> None:
    spec = model(name)
    gamma = 0.5
    part = importance_structured(spec, gamma=gamma)
    arrays = weights_of(spec)

    placement = part.place(arrays, 1)

    assert_inside(placement.regions, {name: array.shape for name, array in arrays.items()})
    assert size(part) <= gamma * sum(parameter.numel() for parameter in spec.module.parameters())
    payload = as_tensors(placement.payload)
    part.suffix.load_state_dict({name: payload[name] for name in placement.regions}, strict=True)
    with torch.no_grad():
        assert part.suffix.eval()(rows(spec.sample)).shape == spec.module.eval()(rows(spec.sample)).shape
    objective = Objective.of(part)
    algorithm = algorithms.build("tcbgd", objective, batch=4, steps=1)
    update = run_round(algorithm, payload, _feed).update
    assert {name: value.shape for name, value in update.items()} == {
        name: payload[name].shape for name in placement.regions
    }
    assert any(not torch.equal(update[name], payload[name]) for name in objective.trainable)


@pytest.mark.parametrize(
    ("budget", "counts", "gamma"),
    mostly_slow(
        [
            *(("parameters", "threshold", 0.1), ("parameters", "even", 0.45)),
            *(("macs", "threshold", 0.45), ("macs", "even", 0.1)),
        ],
        [("parameters", "threshold", 0.1), ("parameters", "even", 0.45), ("macs", "threshold", 0.45)],
    ),
)
def test_the_sliced_network_meets_gamma_and_one_more_channel_would_not(budget, counts, gamma: float) -> None:
    spec = resnet()
    part = importance_structured(spec, gamma=gamma, budget=budget, counts=counts)
    cost = cost_of(spec, channels_of(spec), budget)
    atoms = channels_of(spec).cut()
    every = {atom: atom.size for atom in atoms}
    held = dict(zip(atoms, part.numbers, strict=True))
    assert cost(held) <= gamma * cost(every)
    assert all(1 <= held[atom] <= atom.size for atom in atoms)
    assert any(
        cost(held | {atom: held[atom] + 1}) > gamma * cost(every) for atom in atoms if held[atom] < atom.size
    )


def test_the_costs_are_those_of_the_model_that_is_left() -> None:
    spec = resnet()
    part = importance_structured(spec, gamma=0.3)
    held = dict(zip(channels_of(spec).cut(), part.numbers, strict=True))
    assert cost_of(spec, channels_of(spec), "parameters")(held) == size(part)
    assert cost_of(spec, channels_of(spec), "macs")(held) == macs(part.suffix, part.boundary)
    parameters, multiplications = cost_of_whole(spec)
    assert size(part) < 0.3 * parameters
    assert macs(part.suffix, part.boundary) < multiplications


@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.floats(0.06, 1.0), min_size=2, max_size=4),
    coarse=st.booleans(),
)
def test_slices_are_nested_in_gamma_and_at_one_threshold(seed: int, sizes: list[float], coarse: bool) -> None:
    spec = resnet()
    channels = channels_of(spec)
    [layout] = [next(layouts(channels))]
    rng = np.random.default_rng(seed)
    # Coarse scores have ties, between layers too.
    ranked = [
        rng.integers(1, 4, atom.size) / 2.0 if coarse else rng.random(atom.size) for atom in layout.free
    ]
    cost = cost_of(spec, channels, "parameters")
    whole = cost({atom: atom.size for atom in layout.free})
    found = [search(layout, ranked, cost, gamma * whole) for gamma in sorted(sizes)]
    for smaller, larger in pairwise(found):
        assert all(one <= other for one, other in zip(smaller, larger, strict=True))
    for numbers in found:
        chosen = [strongest_indices(own, count) for own, count in zip(ranked, numbers, strict=True)]
        beyond_first = [
            own[list(held)].min() for own, held, n in zip(ranked, chosen, numbers, strict=True) if n > 1
        ]
        left = [
            np.delete(own, list(held)).max()
            for own, held in zip(ranked, chosen, strict=True)
            if len(held) < len(own)
        ]
        assert not beyond_first or not left or min(beyond_first) >= max(left)


def test_ties_go_to_the_lowest_index_and_the_first_layer() -> None:
    assert strongest_indices(np.array([1.0, 2.0, 2.0, 2.0, 1.0]), 2) == (1, 2)
    assert strongest_indices(np.array([1.0, 2.0, 2.0, 2.0, 1.0]), 4) == (0, 1, 2, 3)
    spec = resnet()
    layout = next(layouts(channels_of(spec)))
    ones = [np.ones(atom.size) for atom in layout.free]
    cost = cost_of(spec, channels_of(spec), "parameters")
    numbers = search(layout, ones, cost, 0.5 * cost({atom: atom.size for atom in layout.free}))
    filled = [number == atom.size for number, atom in zip(numbers, layout.free, strict=True)]
    assert filled == sorted(filled, reverse=True) and any(filled) and not all(filled)


def test_the_score_of_a_channel_is_the_rms_of_all_kernels_that_make_it() -> None:
    spec = resnet()
    part = importance_structured(spec, gamma=0.4)
    w = weights_of(spec)
    [group] = [group for group in part._groups if group.scored[0].name == "block2.conv2.weight"]
    made = [w["block2.conv2.weight"].reshape(6, -1), w["block2.shortcut.conv.weight"].reshape(6, -1)]
    expected = np.sqrt(np.square(np.concatenate(made, axis=1)).mean(1))
    np.testing.assert_allclose(part.score.of(group, w), expected, rtol=1e-6)
    np.testing.assert_allclose(
        ChannelScore("kernel", "mean").of(group, w), np.abs(np.concatenate(made, axis=1)).mean(1), rtol=1e-6
    )
    scaled = importance_structured(spec, gamma=0.4, score="norm")
    [group] = [group for group in scaled._groups if group.scored[0].name == "block2.bn2.weight"]
    pair = np.stack([w["block2.bn2.weight"], w["block2.shortcut.bn.weight"]])
    np.testing.assert_allclose(scaled.score.of(group, w), np.sqrt(np.square(pair).mean(0)), rtol=1e-6)


def test_relative_scores_ask_how_much_a_layer_has_grown() -> None:
    spec = resnet()
    plain, relative = (importance_structured(spec, gamma=0.4, relative=flag) for flag in (False, True))
    weights = weights_of(spec)
    weights["block3.conv1.weight"] *= 1.5
    assert plain.numbers != relative.numbers
    name = "block3.conv1.weight[0]"
    assert relative.replan(weights).layers[name][0] > relative.layers[name][0]
    grown = {key: value * 3 for key, value in weights_of(spec).items()}
    assert relative.replan(grown).numbers == relative.numbers


def test_each_round_holds_the_strongest_channels() -> None:
    spec = resnet()
    part = importance_structured(spec, gamma=0.4)
    weights = weights_of(spec)
    first = part.place(weights, 1)
    position = 3
    assert position not in tuple(first.regions["block1.conv1.weight"].axes[0])  # type: ignore[union-attr]
    weights["block1.conv1.weight"][position] *= 5
    second = part.place(weights, 2)
    region = second.regions["block1.conv1.weight"]
    assert isinstance(region, BlockRegion) and position in tuple(region.axes[0] or ())
    reader = second.regions["block1.conv2.weight"]
    assert isinstance(reader, BlockRegion) and reader.axes[1] == region.axes[0], "its reader follows"
    assert {n: a.shape for n, a in first.payload.items()} == {n: a.shape for n, a in second.payload.items()}
    again = part.place(weights, 9)
    assert again.regions == second.regions
    assert all(again.payload[n].tobytes() == second.payload[n].tobytes() for n in second.payload)
    cut = extract(weights, second.regions)
    assert all(np.array_equal(cut[name], second.payload[name]) for name in cut)


def test_a_tier_can_be_planned_anew_at_the_cost_of_a_new_bundle() -> None:
    spec = resnet()
    part = importance_structured(spec, gamma=0.4)
    weights = weights_of(spec)
    assert part.replan(weights).identity == part.identity, "nothing has changed"
    weights["block3.conv1.weight"] *= 4
    later = part.replan(weights)
    assert later.layers["block3.conv1.weight[0]"] == (8, 8)
    assert later.identity != part.identity and size(later) <= 0.4 * sum(
        parameter.numel() for parameter in spec.module.parameters()
    )
    assert build(spec, "importance_structured", counts=list(later.numbers)).identity == later.identity


class Fused(nn.Module):
    """One kernel that gives out two layers' channels."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(192, 20)
        self.left, self.right = nn.Linear(12, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, first = torch.relu(self.fused(x.flatten(1))), self.left.weight.shape[1]
        return self.left(x[:, :first]) + self.right(x[:, first:])


def test_layers_of_one_tensor_have_names_of_their_own() -> None:
    parts = [importance_structured(one_unit(Fused()), counts=counts) for counts in ((2, 3), (4, 3), (2, 4))]
    assert parts[0].layers == {"all.fused.weight[0]": (2, 12), "all.fused.weight[0]#2": (3, 8)}
    assert parts[0].identity["numbers"] == [2, 3]
    assert all(one.identity != other.identity for one, other in pairwise([*parts, parts[0]]))


class Partly(nn.Module):
    """A layer that can be cut, and a large one whose outputs an operation without a rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.stays = nn.Linear(192, 8), nn.Linear(192, 30)
        self.left, self.right = nn.Linear(8, 5), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.left(torch.relu(self.wide(x))) + self.right(torch.sort(self.stays(x), dim=1)[0])


@pytest.mark.parametrize("budget", ["parameters", "macs"])
def test_too_small_a_gamma_names_the_tensors_that_stay(budget) -> None:
    with pytest.raises(ModelError, match=r"smallest gamma is 0\.") as caught:
        importance_structured(one_unit(Partly()), gamma=0.1, budget=budget)
    assert list(caught.value.details["whole"]) == ["all.stays.weight", "all.right.weight"], (
        "the largest first"
    )
    assert "'all.stays.weight' (5760 entries: dimension 0 of size 30" in caught.value.message
    assert "aten.sort" in caught.value.message
    with pytest.raises(ModelError, match=r"smallest gamma is 0\.") as caught:
        importance_structured(resnet(), gamma=0.001, budget=budget)
    assert not caught.value.details["whole"], "biases of a few classes do not matter"


def test_gamma_1_is_the_whole_model_under_its_own_units() -> None:
    part = importance_structured(resnet())
    assert part.carrier is None and part.units == resnet().units
    assert set(part.place(weights_of(resnet()), 1).regions.values()) == {None}
    assert part.suffix is resnet().module


def test_a_layer_with_a_single_channel_has_no_threshold_to_lose_it_by() -> None:
    part = importance_structured(resnet(), counts=[4, 1, 4, 6, 6, 2, 8])
    assert part.carrier is not None
    assert [group.scored[0].name for group in part.carrier.groups] == [
        "block1.conv1.weight",
        "block3.conv1.weight",
    ]
    thresholds = part.place(weights_of(resnet()), 1).payload[THETA]
    assert thresholds[0] == 0 and thresholds[1] > 0


def test_what_a_submodel_costs_is_what_its_slice_has() -> None:
    part = importance_structured(resnet(), gamma=0.3)
    found = cost_of_submodel(part)
    assert found.parameters == size(part)
    assert found.macs == found.kept_macs == macs(part.suffix, part.boundary)


def test_even_counts_keep_the_same_share_of_each_layer() -> None:
    part = importance_structured(resnet(), gamma=0.3, counts="even")
    shares = [held / there for held, there in part.layers.values()]
    assert max(shares) - min(shares) <= 0.25
    spec = model("resnet20")
    assert leading(
        dict(
            zip(
                channels_of(spec).cut(),
                importance_structured(spec, gamma=0.3, counts="even").numbers,
                strict=True,
            )
        )
    )


def test_what_cannot_be_is_refused_with_what_would_fit() -> None:
    from tests.submodels.nets import Sorted, Written

    spec = resnet()
    with pytest.raises(ModelError, match=r"smallest gamma is 0\.0") as caught:
        importance_structured(spec, gamma=0.001)
    smallest = caught.value.details["smallest"]
    assert set(importance_structured(spec, gamma=smallest).numbers) == {1}
    with pytest.raises(ModelError, match=r"gamma lies in \(0, 1\], found 1\.5"):
        importance_structured(spec, gamma=1.5)
    with pytest.raises(ModelError, match="budget is one of parameters, macs; found 'bytes'"):
        importance_structured(spec, gamma=0.5, budget="bytes")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="7 numbers from 1 to"):
        importance_structured(spec, counts=[1, 2])
    with pytest.raises(ModelError, match=r"more than 0\.1 of all"):
        importance_structured(spec, gamma=0.1, counts=importance_structured(spec).numbers)
    with pytest.raises(ModelError, match="score is one of kernel, norm"):
        importance_structured(spec, gamma=0.5, score="fisher")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r'no norm whose scale.*score = "kernel"'):
        importance_structured(model("mlp"), gamma=0.5, score="norm")
    with pytest.raises(ModelError, match="nothing in Sorted can be cut"):
        importance_structured(one_unit(Sorted()), gamma=0.5)
    with pytest.raises(ModelError, match=r"(?s)Written cannot be cut.*nets\.py:\d+"):
        importance_structured(one_unit(Written()), gamma=0.5)
    with refuses(ConfigError, unknown=["ratio"], accepted=...):
        build(spec, "importance_structured", ratio=0.5)
    weights = weights_of(spec)
    weights["block1.conv1.weight"][0] = np.nan
    with pytest.raises(ModelError, match=r"'block1\.conv1\.weight' has entries that are NaN"):
        importance_structured(spec, gamma=0.4).place(weights, 1)


def _feed(function: Function, step: int) -> Tensors:
    example = function.example(step)
    return {name: tensor for name, tensor in example.items() if name.startswith(("batch", "noise"))}
