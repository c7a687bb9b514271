"""What an update may weigh when weights are what devices claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import parse
from edgefl.wire.limits import Limits
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator import states
from edgefl_server.coordinator.claims import weight_cap
from edgefl_server.coordinator.fleet import Assignments
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import DeviceHello, OpenRound, Rules
from edgefl_server.publish.model import ModelVersion
from edgefl_server.rounds import FixedDownlink, RoundModel, begin_aggregation
from tests.server.fleet import plan_for
from tests.support.errors import ConfigError, refuses

RULES = Rules("run", 0, 1, (TierRule("strong", ("*",)),), min_devices=2)


def opened(rules: Rules, *claims: int) -> OpenRound:
    """The round of devices that claim to have so many samples."""
    rules = replace(rules, min_devices=len(claims))
    state = coordinator.initial("v", 0.0)
    for number, samples in enumerate(claims):
        state, _ = coordinator.step(rules, state, DeviceHello(f"d-{number}", 0, samples), 0.0)
    assert state.round is not None
    return state.round


@pytest.mark.parametrize(
    ("changes", "boaster", "honest"),
    [
        ({"weighted": True}, 1 << 20, 100),
        ({"weighted": True, "most_samples": 500}, 500, 100),
        ({"weighted": True, "most_samples": 500, "samples": 64}, 64, 64),
        ({"most_samples": 500}, 1, 1),
    ],
)
def test_no_update_weighs_more_than_most_samples(changes: Any, boaster: int, honest: int) -> None:
    tasks = opened(replace(RULES, **changes), 1 << 24, 100).assignments
    assert {name: task.weight_limit for name, task in tasks.items()} == {"d-0": boaster, "d-1": honest}


@pytest.mark.parametrize(
    ("claims", "cap", "most"),
    [
        ((100, 90, 110, 1 << 24), 4.0, 400),
        ((1 << 24, 100), 4.0, 400),  # of two the lower one is the median
        ((100, 90, 110, 1 << 24), 1.0, 100),
        ((100, 90, 110, 1 << 24), 0.0, 1 << 20),
        ((0, 0, 1 << 24), 0.5, 1),
        ((1 << 24,), 4.0, 1 << 22),
    ],
)
def test_a_claim_counts_as_some_medians_at_most(claims: tuple[int, ...], cap: float, most: int) -> None:
    """The recipe of the review: one device of a fleet of hundreds of samples claimed 2**20, and was the round."""
    rules = replace(RULES, weighted=True, weight_cap=cap)
    assert weight_cap(rules, opened(rules, *claims)) == most


def test_where_updates_are_not_weighed_each_weighs_one() -> None:
    assert weight_cap(RULES, opened(RULES, 5, 1 << 24)) == 1


@given(
    honest=st.lists(st.integers(1, 1000), min_size=2, max_size=9),
    bad=st.lists(st.integers(0, 1 << 24), max_size=4),
    factor=st.floats(0.5, 10),
)
def test_a_minority_cannot_raise_the_cap(honest: list[int], bad: list[int], factor: float) -> None:
    bad = bad[: len(honest) - 1]
    rules = replace(RULES, weighted=True, weight_cap=factor)
    assert weight_cap(rules, opened(rules, *honest, *bad)) <= max(1, factor * max(honest))


def test_sums_have_room_for_all_weights_up_to_the_cap() -> None:
    spec = plan_for("capped", Limits(), weighted=True, weight_cap=2.0)
    current = opened(spec.rules, 100, 100, 1 << 24)
    names = {f"d-{number}": f"strong-{number}" for number in range(3)}
    tasks = {names[each.device]: replace(each, tier="strong") for each in current.assignments.values()}
    model = ModelVersion.of(spec, 0, spec.initial)

    current = replace(current, assignments=Assignments(tasks))
    active = begin_aggregation(spec, current, RoundModel(model, FixedDownlink({})), device="cpu", sums=None)

    assert active.aggregator.weight_limit == 100 + 100 + 200
    assert [active.weight(claimed) for claimed in (1, 100, 1 << 20)] == [1, 100, 200]


def test_the_federation_file_has_the_same_defaults_and_bounds() -> None:
    assert parse({}, source="x").round.most_samples == RULES.most_samples
    assert parse({}, source="x").round.weight_cap == RULES.weight_cap == 4
    with refuses(ConfigError, keys=["round.weight_cap"]):
        parse({"round": {"weight_cap": -1}}, source="x")
    for wrong in (0, states.MOST_SAMPLES + 1):
        with refuses(ConfigError, keys=["round.most_samples"]):
            parse({"round": {"most_samples": wrong}}, source="x")


def test_a_trimmed_mean_that_trims_nothing_is_refused_where_it_is_written() -> None:
    for rule in ("trimmed_mean", "multi_krum"):
        with pytest.raises(ConfigError, match=rf"{rule} with trim 0 .* set trim = 0\.34"):
            parse({"aggregate": {"rule": rule, "trim": 0}}, source="x")
    assert parse({"aggregate": {"rule": "median", "trim": 0}}, source="x").aggregate.rule == "median"
