"""Updates of changes in the aggregator, and what becomes of those that go too far: the median, and the clip."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.wire.update.form import DENSE, VALUE_LIMIT, FloatEncoding, Form, Section
from edgefl_server.aggregate.aggregator import Aggregator, NormClip, layout_of
from edgefl_server.aggregate.robust import RobustRule
from tests.server.aggregate.small_model import OLD, SUFFIX, WHOLE, drawn


def test_updates_of_changes_and_of_weights_do_not_mix() -> None:
    form = Form("halves", sections=(Section(tuple(OLD), FloatEncoding("float16")),), change=True)
    aggregator = Aggregator(layout_of(OLD), weight_limit=2, device="cpu")
    aggregator.add(aggregator.check(drawn(np.random.default_rng(0), WHOLE), WHOLE), 1)
    with pytest.raises(ValueError, match="hold weights and one of codec 'halves' holds changes"):
        aggregator.add(aggregator.check({"halves": np.zeros(28, np.float16)}, WHOLE, form), 1)


def test_a_change_is_added_to_the_old_weights_and_counts_over_its_holders() -> None:
    form = Form("halves", sections=(Section(tuple(SUFFIX), FloatEncoding("float16")),), change=True)
    aggregator = Aggregator(layout_of(OLD), weight_limit=4, device="cpu")
    for change, weight in ((1.0, 3), (-1.0, 1)):
        aggregator.add(aggregator.check({"halves": np.full(4, change, np.float16)}, SUFFIX, form), weight)
    new = aggregator.result(OLD)
    assert new["a.weight"].tobytes() == OLD["a.weight"].tobytes()
    assert np.array_equal(new["b.bias"], (OLD["b.bias"].astype(np.float64) + 0.5).astype(np.float32))


def test_with_a_base_a_change_of_zero_does_not_count() -> None:
    form = Form("floats", sections=(Section(tuple(SUFFIX), FloatEncoding()),), change=True)
    aggregator = Aggregator(layout_of(OLD), weight_limit=2, device="cpu", base=OLD)
    for values in ([0, 2, 0, 4], [0, 0, 6, 8]):
        aggregator.add(aggregator.check({"values": np.array(values, np.float32)}, SUFFIX, form), 1)
    new = aggregator.result(OLD)
    assert new["b.bias"].tolist() == [np.float32(0.1), 2.0, 9.0] and new["b.scale"] == 8.5


def test_a_median_is_not_moved_by_one_bad_update() -> None:
    aggregator = Aggregator(layout_of(OLD), weight_limit=9, device="cpu", rule=RobustRule("median"))
    for value, weight in ((1.0, 1), (2.0, 1), (VALUE_LIMIT, 7)):
        update = {name: np.full(OLD[name].shape, value, np.float32) for name in SUFFIX}
        aggregator.add(aggregator.check(update, SUFFIX), weight)
    new = aggregator.result(OLD)
    assert (new["b.bias"] == 2).all() and new["b.scale"] == 2
    assert new["a.weight"].tobytes() == OLD["a.weight"].tobytes()
    with pytest.raises(ValueError, match="leave out base"):
        Aggregator(layout_of(OLD), weight_limit=9, base=OLD, rule=RobustRule("median"))


@pytest.mark.parametrize("change", [False, True])
def test_a_change_longer_than_the_limit_is_shortened_to_it(change: bool) -> None:
    step = {"b.bias": np.array([3, 0, 0], np.float32), "b.scale": np.array(4, np.float32)}
    form, arrays = DENSE, {name: OLD[name] + step[name] for name in step}
    if change:
        form = Form("floats", sections=(Section(tuple(SUFFIX), FloatEncoding()),), change=True)
        arrays = {"values": np.array([3, 0, 0, 4], np.float32)}
    for limit, share in ((1.0, 0.2), (5.0, 1.0), (100.0, 1.0)):
        aggregator = Aggregator(layout_of(OLD), weight_limit=1, device="cpu", clip=NormClip(limit, OLD))
        aggregator.add(aggregator.check(arrays, SUFFIX, form), 1)
        new = aggregator.result(OLD)
        for name in SUFFIX:
            np.testing.assert_allclose(new[name] - OLD[name], share * step[name], atol=1e-6)
