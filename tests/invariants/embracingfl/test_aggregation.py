"""EmbracingFL invariants of the aggregation (embracingfl.md, section 7): I5, and the server's half of I7 and I14."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.resnet import resnet8, resnet20
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import BlockRegion, extract, local_shape
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.support.arrays import as_tensors, weights_of
from tests.support.errors import ModelError, refuses
from tests.support.reference import partial_average, run_round
from tests.support.regions import assert_inside

CUTS = {"strong": 0, "moderate": 2, "weak": 3}
Uploads = list[tuple[OutputSide, Arrays]]


def model(bn: str = "global") -> ModelSpec:
    return resnet8(widths=(4, 8, 16), bn=bn, seed=1)  # type: ignore[arg-type]


def uploads_of(spec: ModelSpec, *tiers: str) -> Uploads:
    """One made-up result of local training per client: every tensor the tier trains, statistics included."""
    made: Uploads = []
    for number, tier in enumerate(tiers):
        submodel = OutputSide(spec, CUTS[tier])
        rng = np.random.default_rng(number)
        shapes = {name: spec.weights[name].shape for name in submodel.holds}
        made.append((submodel, {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}))
    return made


def aggregate(spec: ModelSpec, uploads: Uploads, weights: list[int] | None = None) -> Arrays:
    old = weights_of(spec)
    counted = weights or [1] * len(uploads)
    aggregator = Aggregator(layout_of(old), weight_limit=sum(counted) or 1)
    for (submodel, arrays), weight in zip(uploads, counted, strict=True):
        aggregator.add(aggregator.check(arrays, submodel.place({}, 1).regions), weight)
    return aggregator.result(old)


@pytest.mark.parametrize("bn", ["global", "static"])
def test_i5_a_unit_becomes_the_mean_over_the_clients_that_trained_it(bn: str) -> None:
    spec = model(bn)
    uploads = uploads_of(spec, "strong", "weak", "moderate", "weak", "strong")
    new = aggregate(spec, uploads)
    for name in new:
        own = [arrays[name].astype(np.float64) for _, arrays in uploads if name in arrays]
        np.testing.assert_allclose(new[name], np.mean(own, axis=0), atol=1e-6)
    trained = {name: sum(name in arrays for _, arrays in uploads) for name in new}
    assert {trained["stem.conv.weight"], trained["head.dense.weight"]} == {2, 5}


def test_i5_streaming_agrees_with_the_plain_average_in_torch() -> None:
    spec = model()
    uploads = uploads_of(spec, "strong", "weak", "moderate")
    new = aggregate(spec, uploads)
    tensors = [
        (s.place({}, 1).regions, {n: torch.from_numpy(a) for n, a in arrays.items()}) for s, arrays in uploads
    ]
    expected = partial_average(spec.weights, tensors)
    for name, tensor in expected.items():
        np.testing.assert_allclose(new[name], tensor.numpy(), atol=1e-6)


def test_i5_with_all_strong_it_is_fedavg() -> None:
    spec = model()
    uploads = uploads_of(spec, *["strong"] * 4)
    new = aggregate(spec, uploads)
    for name in new:
        by_hand = sum(arrays[name].astype(np.float64) for _, arrays in uploads) / 4
        np.testing.assert_allclose(new[name], by_hand, atol=1e-6)


def test_i5_weighted_by_samples_it_is_the_weighted_mean() -> None:
    spec = model()
    uploads, samples = uploads_of(spec, "strong", "strong", "weak"), [120, 7, 3000]
    new = aggregate(spec, uploads, samples)
    for name in new:
        own = [
            (a[name].astype(np.float64), n) for (_, a), n in zip(uploads, samples, strict=True) if name in a
        ]
        expected = sum(array * n for array, n in own) / sum(n for _, n in own)
        np.testing.assert_allclose(new[name], expected, atol=1e-6)


def test_i5_a_unit_nobody_trained_is_unchanged() -> None:
    spec = model()
    old, new = weights_of(spec), aggregate(spec, uploads_of(spec, "weak", "weak"))
    trained = set(OutputSide(spec, CUTS["weak"]).holds)
    assert trained and trained < set(old)
    for name in old:
        assert (new[name].tobytes() == old[name].tobytes()) == (name not in trained)


def test_i5_every_order_of_the_clients_gives_the_same_bits() -> None:
    spec = model()
    uploads = uploads_of(spec, "strong", "weak", "moderate", "strong")
    results = [aggregate(spec, list(order)) for order in itertools.permutations(uploads)]
    assert all(result[name].tobytes() == results[0][name].tobytes() for result in results for name in result)


def test_i7_all_strong_through_cuts_has_the_bits_of_fedavg_without_cuts() -> None:
    spec = model()
    uploads = uploads_of(spec, *["strong"] * 3)
    old = weights_of(spec)
    fedavg = Aggregator(layout_of(old), weight_limit=3)
    for _, arrays in uploads:
        fedavg.add(fedavg.check(arrays, dict.fromkeys(old)), 1)
    expected, new = fedavg.result(old), aggregate(spec, uploads)
    assert all(new[name].tobytes() == expected[name].tobytes() for name in old)


def test_i7_averaging_one_client_changes_nothing() -> None:
    """The server's half: fixed point with 42 bits behind the point is exact for float32 from 2**-19 on."""
    spec = model()
    [(submodel, arrays)] = uploads_of(spec, "strong")
    new = aggregate(spec, [(submodel, arrays)])
    for name, value in new.items():
        exact = np.abs(arrays[name]) >= 2.0**-19
        assert np.array_equal(value[exact], arrays[name][exact])
        np.testing.assert_allclose(value, arrays[name], rtol=0, atol=2.0**-43)


def test_i14_static_batch_norm_leaves_no_moving_statistics_on_the_server() -> None:
    spec = model("static")
    old = weights_of(spec)
    assert old and not any("running" in name for name in old)
    assert set(aggregate(spec, uploads_of(spec, "strong", "weak"))) == set(old)


def test_i14_global_statistics_are_averaged_over_their_trainers() -> None:
    spec = model("global")
    uploads = uploads_of(spec, "strong", "moderate", "weak")
    new = aggregate(spec, uploads)
    statistics = [name for name in new if name.endswith(("running_mean", "running_var"))]
    assert statistics
    for name in statistics:
        own = [arrays[name].astype(np.float64) for _, arrays in uploads if name in arrays]
        np.testing.assert_allclose(new[name], np.mean(own, axis=0), atol=1e-6)
    assert len({sum(name in arrays for _, arrays in uploads) for name in statistics}) == 3


# -- EmbracingFL I13: width reduction, the leading channels of every layer ---------------------------------


@pytest.mark.parametrize(
    ("ratio", "kept", "parameters"), [(0.45, (7, 14, 28), 52_874), (0.20, (3, 6, 12), 10_006)]
)
def test_i13_channels_of_the_papers_tiers(ratio: float, kept: tuple[int, int, int], parameters: int) -> None:
    part = Width(resnet20(), ratio, "floor")
    regions, local = part.regions(), part.suffix.state_dict()
    last_of_stage = ("block3", "block6", "block9")
    assert tuple(local[f"{unit}.conv2.weight"].shape[0] for unit in last_of_stage) == kept
    assert sum(parameter.numel() for parameter in part.suffix.parameters()) == parameters
    assert regions["stem.conv.weight"] == BlockRegion((range(kept[0]), None, None, None)), (
        "input channels stay"
    )
    assert regions["head.dense.weight"] == BlockRegion((None, range(kept[2]))), "classes stay"
    assert regions["head.dense.bias"] is None
    assert regions["block4.shortcut.conv.weight"] == BlockRegion((range(kept[1]), range(kept[0]), None, None))
    assert regions["block4.bn1.running_var"] == BlockRegion((range(kept[1]),))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(ratios=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=2))
def test_i13_slices_are_nested_prefixes(ratios: list[float]) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    shapes = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    small, large = (Width(spec, ratio, "floor").regions() for ratio in sorted(ratios))
    assert set(small) == set(large) == set(spec.weights)
    for regions in (small, large):
        assert_inside(regions, shapes)
        axes = [
            axis for region in regions.values() if isinstance(region, BlockRegion) for axis in region.axes
        ]
        assert all(axis is None or axis == range(len(axis)) for axis in axes)
    for name in spec.weights:
        inner, outer = (local_shape(name, regions[name], shapes) for regions in (small, large))
        assert all(few <= many for few, many in zip(inner, outer, strict=True))


@settings(max_examples=6, deadline=None)
@given(ratio=st.floats(0.05, 1.0))
def test_i13_extracted_tensors_fit_the_narrow_model(ratio: float) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    part = Width(spec, ratio, "floor")
    local = _local(part)
    part.suffix.load_state_dict(local, strict=True)
    assert sum(int(mask.sum()) for mask in _coverage(part).values()) == sum(
        tensor.numel() for tensor in local.values()
    )


def test_i13_ratio_one_equals_fedavg_bit_for_bit() -> None:
    spec = tiny("resnet8")
    whole, sliced = OutputSide(spec, 0), Width(spec, 1.0)
    assert set(sliced.regions().values()) == {None}
    x, y = samples(spec, 8)
    averages = []
    for part in (whole, sliced):
        algorithm = sgd(Objective.of(part), batch=4, steps=3)
        update = run_round(algorithm, _local(part), walk(x, y, 4)).update
        averages.append(partial_average(spec.weights, [(_placed(part), update)]))
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in spec.weights)


def test_i13_covered_entries_alone_are_averaged() -> None:
    spec = tiny("resnet8")
    parts = [Width(spec, 0.5), Width(spec, 0.75)]
    uploads = []
    for shift, part in enumerate(parts, start=1):
        uploads.append((part.regions(), {k: v + shift for k, v in _local(part).items()}))

    averaged = partial_average(spec.weights, uploads)

    small, large = map(_coverage, parts)
    for name, old in spec.weights.items():
        held_by = small[name] + large[name]
        # Held by both: mean of +1 and +2. Held by the wide one only: +2. Held by nobody: unchanged.
        moved = torch.where(held_by == 2, 1.5, torch.where(held_by == 1, 2.0, 0.0))
        torch.testing.assert_close(averaged[name], old + moved)
    assert any(bool((large[name] == 0).any()) for name in spec.weights)


def test_i13_a_sliced_client_trains_and_returns_its_local_shapes() -> None:
    spec = tiny("resnet8")
    part = Width(spec, 0.5)
    x, y = samples(spec, 8)
    algorithm = sgd(Objective.of(part), batch=4, steps=2)
    local = _local(part)
    update = run_round(algorithm, local, walk(x, y, 4)).update
    shapes = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    for name, tensor in update.items():
        assert tuple(tensor.shape) == local_shape(name, part.regions()[name], shapes)
    assert not torch.equal(update["stem.conv.weight"], local["stem.conv.weight"])


def test_i13_models_without_anything_to_cut_and_wrong_ratios_are_refused() -> None:
    with refuses(ModelError, model="mlp", reasons=...):
        Width(mlp(hidden=()), 0.5)
    with refuses(ModelError, ratio=0.0):
        Width(resnet8(), 0.0)


def _placed(part: Submodel) -> dict[str, object]:
    return dict(part.place(weights_of(part.spec), 1).regions)


def _local(part: Submodel) -> Tensors:
    """What a device starts from."""
    arrays = weights_of(part.spec)
    local = extract(arrays, part.place(arrays, 1).regions)
    return as_tensors(local)


def _coverage(part: Width) -> Tensors:
    """Per global tensor, 1.0 where the slice holds the entry and 0.0 elsewhere."""
    found = {}
    for name, region in part.regions().items():
        whole = tuple(part.spec.weights[name].shape)
        covered = torch.zeros(whole).reshape(-1)
        covered[
            torch.from_numpy(region.positions(whole)) if isinstance(region, BlockRegion) else slice(None)
        ] = 1.0
        found[name] = covered.reshape(whole)
    return found
