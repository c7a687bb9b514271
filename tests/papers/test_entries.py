"""Every entry at every scale: its federations are federations, and its claims read what its arms tell."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import pytest

from edgefl.api.federation import load_federation
from edgefl.papers.catalog import ENTRIES
from edgefl.papers.entry import SCALES, Federated, Scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ENTRIES)
def test_arms_are_federations_with_names_of_their_own(name: str, scale: Scale) -> None:
    arms = ENTRIES[name].arms(scale)
    assert arms and len({arm.name for arm in arms}) == len(arms)
    for arm in arms:
        if isinstance(arm, Federated):
            load_federation(None, {**arm.settings, "federation.seed": 0})


@pytest.mark.parametrize("name", ENTRIES)
def test_the_papers_numbers_are_those_of_arms(name: str) -> None:
    entry = ENTRIES[name]
    arms = {arm.name for arm in chain.from_iterable(entry.arms(scale) for scale in SCALES)}
    published: Mapping[str, Mapping[str, float]] = entry.published
    assert entry.claims and published.keys() <= arms
    for chart in entry.charts:
        assert set(chart.arms) <= arms or not chart.arms
