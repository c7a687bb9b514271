"""What an update may weigh when weights are what devices claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgefl.config import parse
from edgefl.wire.errors import ConfigError
from server.coordinator import machine as coordinator
from server.coordinator.machine import DeviceHello, Rules
from server.coordinator.roster import TierRule

RULES = Rules("run", 0, 1, (TierRule("strong", ("*",)),), min_devices=2)


def limits(rules: Rules) -> dict[str, int]:
    """The most that the update of each device of the round may weigh."""
    state = coordinator.initial("v", 0.0)
    for name, samples in (("boaster", 1 << 24), ("honest", 100)):
        state, _ = coordinator.step(rules, state, DeviceHello(name, 0, samples), 0.0)
    assert state.round is not None
    assert state.round.weight_limit == sum(a.weight_limit for a in state.round.assignments.values())
    return {name: assignment.weight_limit for name, assignment in state.round.assignments.items()}


def test_no_update_weighs_more_than_most_samples_whatever_its_device_claims() -> None:
    weighted = replace(RULES, weighted=True)
    assert limits(weighted) == {"boaster": 1 << 20, "honest": 100}
    assert limits(replace(weighted, most_samples=500)) == {"boaster": 500, "honest": 100}
    assert limits(replace(weighted, most_samples=500, samples=64)) == {"boaster": 64, "honest": 64}
    assert limits(replace(RULES, most_samples=500)) == {"boaster": 1, "honest": 1}


def test_the_federation_file_has_the_same_default_and_refuses_what_cannot_be() -> None:
    assert parse({}, source="x").round.most_samples == RULES.most_samples
    for wrong in (0, coordinator.MOST_SAMPLES + 1):
        with pytest.raises(ConfigError, match=r"round\.most_samples"):
            parse({"round": {"most_samples": wrong}}, source="x")


def test_a_trimmed_mean_that_trims_nothing_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"set trim = 0\.34"):
        parse({"aggregate": {"rule": "trimmed_mean", "trim": 0}}, source="x")
    assert parse({"aggregate": {"rule": "median", "trim": 0}}, source="x").aggregate.rule == "median"
