"""Output-side submodels: chunks, presets, peak bounds; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgefl.config import TierTable, parse
from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.basic import cnn, mlp
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8, resnet20
from edgefl.setup.model import submodel_of
from edgefl.setup.tiers import completed, parse_tiers
from edgefl.submodels import catalog
from edgefl.submodels.catalog import GAMMAS, SubmodelSize, sizes
from edgefl.submodels.cost import NO_WEIGHT, ForwardCostCache, cost, entries, macs, macs_by_weight, model_cost
from edgefl.submodels.output_side.submodel import TIERS, OutputSide, _balance, output_side, tiers
from edgefl.wire import bits, tensors
from edgefl.wire.regions import BlockRegion, EntryRegion
from reproduce.embracingfl import accounting
from tests.invariants.embracingfl.tiny import chunkings, tiny
from tests.rings.rows import mostly_slow
from tests.support import memory_bounds
from tests.support.errors import ModelError, refuses


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=7), data=st.data())
def test_balanced_chunks_have_the_least_possible_maximum(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    units = tuple(str(index) for index in range(len(sizes)))

    def largest(groups: list[tuple[str, ...]]) -> int:
        return max(sum(sizes[int(name)] for name in group) for group in groups)

    found = list(_balance(units, sizes, count))
    best = min(largest(groups) for groups in chunkings(units) if len(groups) == count)
    assert len(found) == count and tuple(name for group in found for name in group) == units
    assert largest(found) == best


def test_holds_lists_the_suffix_tensors_and_they_are_placed_whole() -> None:
    spec = resnet8()
    part = OutputSide(spec, 3)
    assert {name.partition(".")[0] for name in part.holds} == {"block3", "head"}
    regions = part.place({}, 1).regions
    assert set(part.holds) == set(regions)
    assert set(regions.values()) == {None}
    assert part.boundary.shape == (32, 14, 14)


def test_the_strong_tier_has_no_prefix_and_no_record() -> None:
    part = tiers("resnet20")["strong"].of(resnet20())
    assert part.prefix == () and part.groups == ()
    assert part.boundary.shape == (3, 32, 32)
    assert memory_bounds.record(part, 390) == 0


@pytest.mark.parametrize(
    ("model", "cuts"),
    [("resnet20", (0, 4, 7)), ("resnet8", (0, 2, 3)), ("cnn", (0, 2, 3)), ("bilstm", (0, 1, 1))],
)
def test_presets_nest(model: str, cuts: tuple[int, int, int]) -> None:
    spec = tiny(model)
    parts = [tier.of(spec) for tier in tiers(model).values()]
    assert list(tiers(model)) == ["strong", "moderate", "weak"]
    assert tuple(part.cut for part in parts) == cuts
    assert set(parts[2].holds) <= set(parts[1].holds) <= set(parts[0].holds) == set(spec.weights)


@pytest.mark.parametrize("model", mostly_slow(sorted(TIERS), ["cnn", "resnet20", "resnet8"]))
def test_every_preset_fits_its_model_and_needs_less_from_tier_to_tier(model: str) -> None:
    spec = build_model(model)
    parts = {name: tier.of(spec) for name, tier in TIERS[model].items()}
    capacities = [accounting.capacity(part) for part in parts.values()]

    assert list(parts) == ["strong", "moderate", "weak"]
    assert capacities[0] == 1.0 and capacities == sorted(capacities, reverse=True)
    assert capacities[2] < capacities[1] or model == "bilstm"


def test_forward_peaks_of_transformers_and_language_models_are_found() -> None:
    small = build_model("bert", length=6, vocabulary=20, width=12, depth=2)
    chunk = OutputSide(small, 2).prefix[0]
    weights = sum(tensor.numel() for tensor in chunk.module.state_dict().values())
    # At least the feed-forward layer's 4 x 12 values per token are alive at once, for 2 samples of 6 tokens.
    assert memory_bounds.m_forward(chunk, 2) - weights >= 2 * 6 * 48

    words = build_model("lstm_lm", length=5, vocabulary=20, features=6, hidden=4)
    assert memory_bounds.m_forward(OutputSide(words, 2).prefix[0], 2) > 0


def test_recurrent_stacks_count_10_values_per_unit_layer_and_step() -> None:
    words = build_model("lstm_lm", length=5, vocabulary=20, features=6, hidden=4, layers=2)
    counts = {name: a for name, _, a in memory_bounds.per_unit(words)}

    assert counts == {"embedding": 0, "lstm": 10 * 4 * 2 * 5, "decoder": 5 * 20}


def test_lstm_weak_tier_needs_the_lstm_twice() -> None:
    spec = tiny("bilstm")
    weak = tiers("bilstm")["weak"].of(spec)
    assert weak.skip == 4
    assert weak.boundary.shape == (8 * 6 + 4 * 5,)
    assert weak.prefix[0].units == ("embedding", "lstm")
    assert {name for name in weak.prefix[0].module.state_dict() if name.startswith("lstm.")} == {
        name for name in weak.holds if name.startswith("lstm.")
    }


def test_a_file_says_the_lstm_weak_tier_and_its_preset_is_that_one() -> None:
    spec, weak = tiny("bilstm"), tiers("bilstm")["weak"].of(tiny("bilstm"))
    table = completed(parse({"model": {"name": "bilstm"}}, source="the test")).tiers["weak"]

    assert table.options == {"skip": 0.5}
    assert submodel_of(spec, "weak", table).identity == weak.identity
    with pytest.raises(
        ModelError, match=r"records states of 8 tokens, and this input has 4: leave out data\.lengths"
    ):
        submodel_of(spec.shortened(4), "weak", table)
    text = parse_tiers("weak", "bilstm")["weak"]
    assert TierTable(**text).submodel == table.submodel
    with refuses(ModelError, skip=4):
        output_side(spec, cut=1, skip=4)


def test_a_sample_may_be_one_number() -> None:
    table = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))

    assert output_side(split(table, sample=TensorSpec((), torch.int64, 5), classes=2)).skip == 0


def test_the_paper_s_lstm_record_is_66_560_floats_per_sample() -> None:
    from edgefl.models.zoo.basic import bilstm

    weak = tiers("bilstm")["weak"].of(bilstm())
    assert weak.boundary.shape == (1_024 + 65_536,)


@pytest.mark.slow
def test_peak_bounds_of_the_tiers_of_resnet20() -> None:
    spec = resnet20()
    parts = {name: tier.of(spec) for name, tier in tiers("resnet20").items()}
    peaks = {name: memory_bounds.m_peak(part) for name, part in parts.items()}
    assert peaks["strong"] > peaks["moderate"] > peaks["weak"]
    weak = parts["weak"]
    assert memory_bounds.m_train(weak) == 3 * 206_346 + 2 * 917_824 + 32 * 8_192
    # H (stage 1 maps) and Hnew (stage 2 maps) coexist while the second chunk runs.
    assert memory_bounds.record(weak, 390) == 390 * (16_384 + 8_192)
    assert memory_bounds.record(parts["moderate"], 390) == 390 * 16_384
    in_ram = memory_bounds.m_peak(weak, samples=390, record_in_ram=True)
    assert in_ram == peaks["weak"] + memory_bounds.record(weak, 390)


def test_a_dense_layer_frozen_in_one_chunk_may_need_more_than_training() -> None:
    weak = tiers("cnn")["weak"].of(cnn())
    assert memory_bounds.m_peak(weak, batch=1) > memory_bounds.m_train(weak, batch=1)


def test_wrong_cuts_chunks_and_presets_are_refused() -> None:
    spec = resnet8()
    with refuses(ModelError, cut=5, units=("stem", "block1", "block2", "block3", "head")):
        OutputSide(spec, 5)
    with refuses(ModelError, chunks=3, units=("stem", "block1")):
        OutputSide(spec, 2, 3)
    with refuses(ModelError, chunks=(("block1", "stem"),), units=("stem", "block1"), cut=2):
        OutputSide(spec, 2, [("block1", "stem")])
    with pytest.raises(ModelError, match="give cuts"):
        tiers("mlp")
    with refuses(ModelError, skip=3, unit="Block"):
        OutputSide(spec, 1, 1, skip=3)


def test_submodels_share_the_model_s_tensors() -> None:
    spec = mlp()
    part = OutputSide(spec, 1)
    with torch.no_grad():
        spec.module.get_submodule("head.dense").bias.fill_(3.0)
    assert part.suffix.state_dict()["head.dense.bias"].eq(3.0).all()


def test_a_chunk_fetches_the_units_that_have_weights() -> None:
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    spec = split(layers, sample=TensorSpec((1, 2, 2)), classes=2)
    part = OutputSide(spec, 5, [spec.units[:1], spec.units[1:5]])
    assert [chunk.units for chunk in part.prefix] == [(), ("1", "3")]


# -- what a submodel costs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cost_resnet8() -> ModelSpec:
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
    parameters, found = model_cost(build_model("resnet18"))

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
    forwards = ForwardCostCache(ModelSpec("twice", module, sample, classes=5))
    assert forwards.of(module, sample).macs == macs_by_weight(module, sample)


def test_products_without_weights_are_counted_too() -> None:
    spec = build_model("vit")

    assert macs_by_weight(spec.module, spec.sample)[NO_WEIGHT] > 0


@pytest.mark.parametrize("model", ["cnn", "lstm_lm"])
@pytest.mark.parametrize(
    "size", [SubmodelSize("output_side", {"cut": 1}), SubmodelSize("width", {"gamma": 0.25})]
)
def test_forward_passes_that_submodels_share_cost_as_much_as_their_own(
    model: str, size: SubmodelSize
) -> None:
    spec = build_model(model)
    submodel = size.of(spec)
    shared, alone = ForwardCostCache(spec), ForwardCostCache(submodel.spec)

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
    [region] = [region for region in placement.regions.values() if isinstance(region, EntryRegion)]
    held = entries({"values": region}, {name: tuple(v.shape) for name, v in spec.weights.items()})
    assert found.macs == 36 * 54 + 540
    assert found.kept_macs == 36 * held["conv.weight"] + held["out.weight"] < found.macs


def test_importance_bytes_are_the_formulas_of_8_3_and_headers(cost_resnet8: ModelSpec) -> None:
    submodel = catalog.build(cost_resnet8, "importance", gamma=0.25)
    weights = {name: value.numpy() for name, value in cost_resnet8.weights.items()}
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


def test_a_width_slice_sends_the_same_bytes_both_ways(cost_resnet8: ModelSpec) -> None:
    submodel = catalog.build(cost_resnet8, "width", gamma=0.25)

    found = cost(submodel)

    assert found.download_bytes == found.upload_bytes
    assert found.parameters == sum(p.numel() for p in submodel.suffix.parameters())
    assert found.macs == found.kept_macs == macs(submodel.suffix, submodel.boundary)


def test_an_output_side_downloads_its_frozen_units_and_uploads_the_others(cost_resnet8: ModelSpec) -> None:
    all_of_it, last = (cost(catalog.build(cost_resnet8, "output_side", cut=cut)) for cut in (0, 3))

    assert last.download_bytes == all_of_it.download_bytes
    assert last.upload_bytes < all_of_it.upload_bytes
    assert last.macs + last.prefix_macs == all_of_it.macs and all_of_it.prefix_macs == 0


def test_a_round_is_three_passes_per_step_and_one_frozen(cost_resnet8: ModelSpec) -> None:
    found = cost(catalog.build(cost_resnet8, "output_side", cut=3))

    work = found.round_macs(batch=4, steps=5, samples=7)

    assert work == 3 * found.macs * 20 + 7 * found.prefix_macs


def test_held_entries_are_counted_per_global_tensor() -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": (5,)}
    regions = {
        "a": BlockRegion((range(1), None)),
        "c": None,
        "v": EntryRegion(("a", "b"), np.array([1, 6, 9])),
    }

    assert entries(regions, shapes) == {"a": 3 + 1, "c": 5, "b": 2}


def test_sizes_are_every_cut_and_every_gamma_of_every_kind(cost_resnet8: ModelSpec) -> None:
    found = sizes(cost_resnet8)

    assert {size.kind for size in found} == set(catalog.KINDS)
    assert [size.options["cut"] for size in found if size.kind == "output_side"] == [0, 1, 2, 3, 4]
    assert sorted(size.options["gamma"] for size in found if size.kind == "width") == sorted(GAMMAS)


def test_a_finer_cut_has_a_chunk_for_each_frozen_unit(cost_resnet8: ModelSpec) -> None:
    finer = SubmodelSize("output_side", {"cut": 3}).finer

    assert finer is not None and finer.finer is None
    assert [len(chunk.units) for chunk in finer.of(cost_resnet8).prefix] == [1, 1, 1]
    assert (
        SubmodelSize("output_side", {"cut": 1}).finer is None
        and SubmodelSize("width", {"gamma": 0.5}).finer is None
    )
