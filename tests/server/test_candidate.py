"""From the table ``rollout`` to a candidate whose updates go into the same sums, or to the reason why they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.config import Federation, parse
from edgefl.data.datasets import digits
from edgefl.errors import ConfigError
from edgefl.setup.bundles import outline_of
from edgefl.setup.runs import run_digest
from edgefl.setup.training import candidate_of
from edgefl.wire.bundle.archive import BundleArchive
from edgefl_export.compiler.request import Exchange, TierTraining
from edgefl_server.compose import BundleFor, compose_with
from edgefl_server.run_spec import RunSpec

DATASET = digits().limited(train=40, test=20)


def federation(**changes: Any) -> Federation:
    tables: dict[str, Any] = {
        "model": {"name": "mlp", "options": {"hidden": [6, 5]}},
        "algorithm": {"batch": 4, "steps": 2, "lr": 0.2},
        "data": {"name": "digits"},
        "tiers": {"strong": {"count": 4}, "half": {"kind": "width", "gamma": 0.5, "count": 2}},
    }
    for key, value in changes.items():
        tables[key] = {**tables.get(key, {}), **value}
    return parse(tables, source="the test")


def outlines(federation: Federation) -> BundleFor:
    """Bundles without graphs: nothing is compiled."""

    def of(tier: TierTraining, exchange: Exchange, _format: str) -> BundleArchive:
        return outline_of(federation, DATASET, tier, exchange)

    return of


def composed_spec(given: Federation) -> RunSpec:
    other = outlines(candidate_of(given)) if given.rollout.on else None
    return compose_with(given, DATASET, outlines(given), other)


def test_a_candidate_shares_its_tiers_part_of_the_model() -> None:
    spec = composed_spec(
        federation(rollout={"algorithm": {"batch": 8, "steps": 3}, "rounds": 4, "share": 0.2})
    )
    assert set(spec.tiers) == {"strong", "half", "strong@candidate", "half@candidate"}
    for tier in ("strong", "half"):
        ours, theirs = spec.tiers[tier], spec.tiers[f"{tier}@candidate"]
        assert (ours.bundle.manifest.batch, theirs.bundle.manifest.batch) == (4, 8)
        assert (ours.published, ours.form) == (theirs.published, theirs.form), "nothing is published twice"
    rule = spec.rules.rollout
    assert rule is not None and (rule.tiers, rule.rounds, rule.share) == (("strong", "half"), 4, 0.2)
    assert [tier.name for tier in spec.rules.tiers] == ["strong", "half"], "no device asks for a candidate"


def test_only_the_named_tiers_have_a_candidate() -> None:
    spec = composed_spec(federation(rollout={"tiers": {"half": {"activations": "float16"}}}))
    assert set(spec.tiers) == {"strong", "half", "half@candidate"}
    assert composed_spec(federation()).rules.rollout is None


def test_a_tier_that_a_federation_without_tiers_does_not_have_is_named() -> None:
    given = parse(
        {"model": {"name": "mlp"}, "rollout": {"tiers": {"weak": {"activations": "float16"}}}},
        source="the test",
    )
    with pytest.raises(ConfigError, match=r"rollout\.tiers has weak"):
        composed_spec(given)


def test_another_algorithm_has_its_own_options() -> None:
    other = candidate_of(federation(rollout={"algorithm": {"name": "fedprox", "mu": 0.1}}))
    assert other.algorithm.arguments == {"batch": 32, "steps": 10, "mu": 0.1}
    same = candidate_of(federation(rollout={"algorithm": {"momentum": 0.5}}))
    assert same.algorithm.arguments == {"batch": 4, "steps": 2, "lr": 0.2, "momentum": 0.5}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "candidate", "named"),
    [
        ("sgd", {"lr": 0.1}, "its scalars are"),
        ("sgd", {"name": "fedbat"}, "another form on the wire"),
        ("sgd", {"name": "local_amsgrad", "lr": 0.2}, "the server's step is amsgrad for it, and mean"),
        ("sgd", {"name": "scaffold", "lr": 0.2}, "needs every device in every round"),
        ("scaffold", {"batch": 8}, "needs every device in every round"),
        ("sgd", {"pace": 3}, "pace"),
    ],
)
def test_unlike_candidates_are_refused(algorithm: str, candidate: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        composed_spec(federation(algorithm={"name": algorithm}, rollout={"algorithm": candidate}))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"tiers": {"weak": {"activations": "float16"}}}, "rollout.tiers has weak"),
        ({"tiers": {"half": {}}}, "set memory_budget or activations"),
        ({"share": 1.0, "algorithm": {"batch": 8}}, "rollout.share"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        federation(rollout=table)


def test_a_run_goes_on_under_the_same_rollout_and_selection_only() -> None:
    digests = {
        run_digest(federation(**changes))
        for changes in (
            {},
            {"rollout": {"algorithm": {"batch": 8}}},
            {"selection": {"policy": "longest-idle"}},
        )
    }
    assert len(digests) == 3
