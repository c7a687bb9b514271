"""What a submodel costs: counted from the submodel itself, whatever its kind."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog
from edgefl.submodels.catalog import GAMMAS, Size, sizes
from edgefl.submodels.cost import NO_WEIGHT, Forwards, cost, entries, macs, macs_by_weight, whole
from edgefl.wire import bits, tensors
from edgefl.wire.regions import Block, Entries


@pytest.fixture(scope="module")
def resnet8() -> ModelSpec:
    return build_model("resnet8", size=16)


def two_layers() -> ModelSpec:
    """A convolution read at 36 places (2 -> 3 channels, 3x3), then a product (108 -> 5)."""
    module = nn.Sequential()
    module.add_module("conv", nn.Conv2d(2, 3, 3, padding=1, bias=False))
    module.add_module("flat", nn.Flatten())
    module.add_module("out", nn.Linear(108, 5))
    return ModelSpec("two", module, TensorSpec((2, 6, 6)), classes=5)


def header(arrays: dict[str, np.ndarray]) -> int:
    return len(tensors.dump(arrays)) - sum(array.nbytes for array in arrays.values())


def test_macs_of_resnet18_are_those_of_the_spec() -> None:
    parameters, found = whole(build_model("resnet18"))

    assert parameters == 11_173_962
    assert round(found / 1e6) == 555, "fiarse.md 8.2 counts 555 M"


def test_macs_belong_to_the_weights_they_multiply_with() -> None:
    spec = two_layers()

    assert macs_by_weight(spec.module, spec.sample) == {"conv.weight": 36 * 54, "out.weight": 540}


def test_a_module_that_is_used_twice_counts_each_time() -> None:
    twice, pool = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.MaxPool2d(2)
    module = nn.Sequential(twice, pool, twice, pool, nn.Flatten(), nn.Linear(8, 5))
    sample = TensorSpec((2, 8, 8))

    assert macs_by_weight(module, sample) == {"2.weight": (64 + 16) * 36, "5.weight": 40}
    forwards = Forwards(ModelSpec("twice", module, sample, classes=5))
    assert forwards.of(module, sample).macs == macs_by_weight(module, sample)


def test_products_without_weights_are_counted_too() -> None:
    spec = build_model("vit")

    assert macs_by_weight(spec.module, spec.sample)[NO_WEIGHT] > 0


@pytest.mark.parametrize("model", ["cnn", "lstm_lm"])
@pytest.mark.parametrize("size", [Size("output_side", {"cut": 1}), Size("width", {"gamma": 0.25})])
def test_forward_passes_that_submodels_share_cost_as_much_as_their_own(model: str, size: Size) -> None:
    spec = build_model(model)
    submodel = size.of(spec)
    shared, alone = Forwards(spec), Forwards(submodel.spec)

    shared.of(spec.module, spec.sample)

    found = shared.of(submodel.suffix, submodel.boundary)
    assert found.macs == macs_by_weight(submodel.suffix, submodel.boundary)
    assert cost(submodel, shared) == cost(submodel, alone)


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 4])
def test_importance_computes_everything_and_keeps_macs_by_position(gamma: float) -> None:
    spec = two_layers()
    submodel = catalog.build(spec, "importance", gamma=gamma)

    found = cost(submodel)

    placement = submodel.place({name: value.numpy() for name, value in spec.weights.items()}, 1)
    [region] = [region for region in placement.regions.values() if isinstance(region, Entries)]
    held = entries({"values": region}, {name: tuple(v.shape) for name, v in spec.weights.items()})
    assert found.macs == 36 * 54 + 540
    assert found.kept_macs == 36 * held["conv.weight"] + held["out.weight"] < found.macs


def test_importance_bytes_are_the_formulas_of_8_3_and_headers(resnet8: ModelSpec) -> None:
    submodel = catalog.build(resnet8, "importance", gamma=0.25)
    weights = {name: value.numpy() for name, value in resnet8.weights.items()}
    payload = submodel.place(weights, 1).payload
    carrier = submodel.carrier
    assert carrier is not None

    found = cost(submodel)

    always = sum(4 * int(np.prod(spec.shape)) for spec in carrier.dense.values())
    thetas = 4 * len(carrier.maskable)
    told = bits.packed_bytes(carrier.entries) + 4 * carrier.kept
    assert found.download_bytes == told + always + thetas + header(payload)
    sent = {name: weights[name] for name in carrier.dense} | {"submodel.values": np.zeros(carrier.kept, "f4")}
    assert found.upload_bytes == 4 * carrier.kept + always + header(sent)


def test_a_width_slice_sends_the_same_bytes_both_ways(resnet8: ModelSpec) -> None:
    submodel = catalog.build(resnet8, "width", gamma=0.25)

    found = cost(submodel)

    assert found.download_bytes == found.upload_bytes
    assert found.parameters == sum(p.numel() for p in submodel.suffix.parameters())
    assert found.macs == found.kept_macs == macs(submodel.suffix, submodel.boundary)


def test_an_output_side_downloads_its_frozen_units_and_uploads_the_others(resnet8: ModelSpec) -> None:
    all_of_it, last = (cost(catalog.build(resnet8, "output_side", cut=cut)) for cut in (0, 3))

    assert last.download_bytes == all_of_it.download_bytes
    assert last.upload_bytes < all_of_it.upload_bytes
    assert last.macs + last.prefix_macs == all_of_it.macs and all_of_it.prefix_macs == 0


def test_a_round_is_three_passes_per_step_and_one_frozen(resnet8: ModelSpec) -> None:
    found = cost(catalog.build(resnet8, "output_side", cut=3))

    work = found.round_macs(batch=4, steps=5, samples=7)

    assert work == 3 * found.macs * 20 + 7 * found.prefix_macs


def test_held_entries_are_counted_per_global_tensor() -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": (5,)}
    regions = {"a": Block((range(1), None)), "c": None, "v": Entries(("a", "b"), np.array([1, 6, 9]))}

    assert entries(regions, shapes) == {"a": 3 + 1, "c": 5, "b": 2}


def test_sizes_are_every_cut_and_every_gamma_of_every_kind(resnet8: ModelSpec) -> None:
    found = sizes(resnet8)

    assert {size.kind for size in found} == set(catalog.KINDS)
    assert [size.options["cut"] for size in found if size.kind == "output_side"] == [0, 1, 2, 3, 4]
    assert sorted(size.options["gamma"] for size in found if size.kind == "width") == sorted(GAMMAS)


def test_a_finer_cut_has_a_chunk_for_each_frozen_unit(resnet8: ModelSpec) -> None:
    finer = Size("output_side", {"cut": 3}).finer

    assert finer is not None and finer.finer is None
    assert [len(chunk.units) for chunk in finer.of(resnet8).prefix] == [1, 1, 1]
    assert Size("output_side", {"cut": 1}).finer is None and Size("width", {"gamma": 0.5}).finer is None
