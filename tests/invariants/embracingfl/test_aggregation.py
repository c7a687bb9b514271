"""EmbracingFL invariants of the aggregation (embracingfl.md, section 7): I5, and the server's half of I7 and I14."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.resnet import resnet8
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.support.arrays import weights_of
from tests.support.reference import partial_average

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
