"""The partial-synchronisation study: the entries that a scheme averages, and the similarity of layers."""

from __future__ import annotations

import pytest
import torch

from edgefl.data.datasets import digits
from edgefl.data.partition import dirichlet
from edgefl.models.zoo.resnet import resnet8, resnet18, resnet20
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import BlockRegion, EntryRegion
from reproduce.embracingfl.measures import averaged, half_cut, partial_sync, similarities, synchronised
from tests.invariants.embracingfl.tiny import svcca, tiny
from tests.support.errors import ModelError
from tests.support.regions import assert_inside


def test_the_half_of_resnet20_ends_with_block_four() -> None:
    spec = resnet20()
    assert spec.units[: half_cut(spec)] == ("stem", "block1", "block2", "block3", "block4")
    assert 0 < half_cut(resnet18()) < 10


def test_the_halves_part_the_model() -> None:
    spec = tiny("resnet8")
    first, second = synchronised(spec, "first_half"), synchronised(spec, "second_half")
    assert not first.keys() & second.keys() and first.keys() | second.keys() == spec.weights.keys()
    assert "stem.bn.running_mean" in first and "head.dense.bias" in second
    assert synchronised(spec, "none") == {}

    channel = synchronised(spec, "channel")
    assert channel == dict(Width(spec, 0.5, "floor").regions())
    assert channel["block2.conv2.weight"] == BlockRegion((range(3), range(3), None, None))
    assert_inside(channel, {name: tuple(tensor.shape) for name, tensor in spec.weights.items()})


def test_averaging_replaces_only_its_regions() -> None:
    spec = tiny("resnet8")
    models = [{name: tensor + shift for name, tensor in spec.weights.items()} for shift in (0.0, 1.0, 5.0)]
    for scheme in ("none", "second_half", "first_half", "channel"):
        regions = synchronised(spec, scheme)
        result = averaged(models, regions)
        for name, tensor in spec.weights.items():
            region = regions.get(name, BlockRegion(tuple(range(0) for _ in tensor.shape)))
            assert not isinstance(region, EntryRegion)
            shared = torch.zeros(tensor.numel(), dtype=torch.bool)
            held = slice(None) if region is None else torch.from_numpy(region.positions(tuple(tensor.shape)))
            shared[held] = True
            shared = shared.reshape(tensor.shape)
            for model, own in zip(result, models, strict=True):
                torch.testing.assert_close(model[name], torch.where(shared, tensor + 2.0, own[name]))


def test_conv_maps_are_channels_by_samples_and_positions() -> None:
    maps = torch.randn(5, 3, 2, 4)
    assert svcca(maps, maps.movedim(1, 0).flatten(1)) == pytest.approx(1.0)
    assert svcca(maps, maps.flip(1)) == pytest.approx(1.0)


def test_layers_without_variance_are_like_each_other() -> None:
    dead, alive = torch.full((4, 30), 0.3), torch.randn(4, 30)
    assert svcca(dead, 2 * dead) == 1.0 and svcca(dead, alive) == 0.0
    assert svcca(torch.cat((alive[:2], dead[:2])), alive[:2]) == pytest.approx(1.0)


def test_models_that_diverged_are_refused() -> None:
    with pytest.raises(ModelError, match="NaN or infinity"):
        svcca(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2))


@pytest.mark.parametrize("scheme", ["none", "first_half"])
def test_clients_drift_apart_where_nothing_is_averaged(scheme: str) -> None:
    data = digits().limited(train=400, test=64)
    x, y = torch.from_numpy(data.read(data.train_x)), torch.from_numpy(data.train_y)
    parts = [torch.as_tensor(part) for part in dirichlet(data.train_y, 4, alpha=0.1, seed=0, min_samples=8)]
    spec = resnet8(size=8, widths=(4, 8, 8), in_channels=data.shape[0])
    regions = synchronised(spec, "none" if scheme == "none" else "first_half")
    clients = [(x[rows], y[rows]) for rows in parts]

    runs = [
        list(partial_sync(spec, clients, regions, rounds=2, every=3, batch=16, lr=0.05)) for _ in range(2)
    ]
    assert len(runs[0]) == 2
    for one, other in zip(runs[0][-1], runs[1][-1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    found = similarities(
        spec, runs[0][-1], torch.from_numpy(data.read(data.test_x)), ("stem", "block3.conv2")
    )
    assert all(0.0 <= value <= 1.0 for layer in found.values() for value in layer)
    assert max(found["block3.conv2"]) < 0.999
    assert (min(found["stem"]) > 1 - 1e-6) == (scheme == "first_half")
