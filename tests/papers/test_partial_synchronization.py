"""The partial-synchronisation study: which entries a scheme averages, and what the loop measures."""

from __future__ import annotations

import pytest
import torch

from edgefl.data.datasets import digits
from edgefl.data.partition import dirichlet
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8, resnet18, resnet20
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import BlockRegion
from reproduce.embracingfl.partial_synchronization import (
    Samples,
    averaged,
    half_cut,
    matrix,
    partial_sync,
    similarities,
    svcca,
    synchronised,
)
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.support.errors import ModelError, refuses
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
            shared = torch.zeros(tensor.numel(), dtype=torch.bool)
            held = slice(None) if region is None else torch.from_numpy(region.positions(tuple(tensor.shape)))
            shared[held] = True
            shared = shared.reshape(tensor.shape)
            for model, own in zip(result, models, strict=True):
                torch.testing.assert_close(model[name], torch.where(shared, tensor + 2.0, own[name]))


def test_conv_maps_are_channels_by_samples_and_positions() -> None:
    maps = torch.randn(5, 3, 2, 4)
    rows = matrix(maps)
    assert rows.shape == (3, 40)
    assert torch.equal(rows[1], maps[:, 1].reshape(-1))
    tokens = torch.randn(5, 6, 3)
    assert torch.equal(matrix(tokens)[2], tokens[:, :, 2].reshape(-1))
    assert svcca(maps, maps.flip(1)) == pytest.approx(1.0)


def test_layers_without_variance_are_like_each_other() -> None:
    dead, alive = torch.full((4, 30), 0.3), torch.randn(4, 30)
    assert svcca(dead, 2 * dead) == 1.0 and svcca(dead, alive) == 0.0
    assert svcca(torch.cat((alive[:2], dead[:2])), alive[:2]) == pytest.approx(1.0)


def test_bad_input_is_refused() -> None:
    spec = tiny("resnet8")
    x, _ = samples(spec, 4)
    with refuses(ModelError, columns=(30, 20)):
        svcca(torch.randn(3, 30), torch.randn(3, 20))
    with pytest.raises(ModelError, match="NaN or infinite"):
        svcca(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2))
    with refuses(ModelError, keep=0):
        svcca(torch.randn(3, 30), torch.randn(3, 30), keep=0)
    with refuses(ModelError, models=1, batches=1):
        similarities(spec, [spec.weights], [x])
    with pytest.raises(ModelError, match="no submodule 'conv9'"):
        similarities(spec, [spec.weights] * 2, [x], ["conv9"])
    with refuses(ModelError, scheme="all"):
        synchronised(spec, "all")  # type: ignore[arg-type]
    with refuses(ModelError, cut=5):
        synchronised(spec, "first_half", cut=5)


@pytest.fixture(scope="module")
def study() -> tuple[ModelSpec, list[Samples], list[torch.Tensor]]:
    """Four clients with skewed digits, and digits that none of them has."""
    data = digits().limited(train=400, test=64)
    x = torch.from_numpy(data.read(data.train_x))
    y = torch.from_numpy(data.train_y)
    parts = [torch.as_tensor(part) for part in dirichlet(data.train_y, 4, alpha=0.1, seed=0, min_samples=8)]
    spec = resnet8(size=8, widths=(4, 8, 8), in_channels=data.shape[0])
    return spec, [(x[rows], y[rows]) for rows in parts], [torch.from_numpy(data.read(data.test_x))]


@pytest.mark.slow
def test_without_synchronisation_the_input_side_stays_more_alike(
    study: tuple[ModelSpec, list[Samples], list[torch.Tensor]],
) -> None:
    spec, clients, held_out = study
    found = list(partial_sync(spec, clients, held_out, {}, rounds=2, every=5, batch=16, lr=0.05))
    assert [measured.step for measured in found] == [5, 10]
    last = found[-1].layers
    assert tuple(last) == spec.units
    assert last["stem"].mean > last["head"].mean + 0.1
    assert all(0.0 <= layer.mean <= layer.largest < 1.0 for layer in last.values())


def test_a_study_is_reproducible(study: tuple[ModelSpec, list[Samples], list[torch.Tensor]]) -> None:
    spec, clients, held_out = study
    regions = synchronised(spec, "first_half")
    runs = [
        list(
            partial_sync(
                spec,
                clients,
                held_out,
                regions,
                rounds=1,
                every=2,
                batch=64,
                lr=0.05,
                layers=("stem.conv", "block3.conv2"),
            )
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    layers = runs[0][-1].layers
    assert layers["stem.conv"].mean == pytest.approx(1.0) and layers["block3.conv2"].largest < 0.999


def test_models_with_dropout_and_tokens_can_be_studied() -> None:
    spec = build_model("lstm_lm", length=4, vocabulary=12, features=5, hidden=5, rate=0.2)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (24, 5), generator=generator)
    clients = [(tokens[:10, :-1], tokens[:10, 1:]), (tokens[10:20, :-1], tokens[10:20, 1:])]
    (found,) = partial_sync(spec, clients, [tokens[20:, :-1]], {}, rounds=1, every=2, batch=12)
    assert found.layers.keys() == set(spec.units)
