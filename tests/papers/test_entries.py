"""Every entry at every scale: its federations are federations, and its claims read what its arms tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgefl.api.federation import load_federation
from reproduce.campaign import ENTRIES, reproduce
from reproduce.entry import SCALES, Federated, Scale


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


@pytest.mark.slow
def test_entries_leave_their_pages_pictures_and_results(tmp_path: Path) -> None:
    """Those that need no dataset, computations and pictures of their own."""
    names = ("fafed/speedup", "fedbat/theory", "per_fedavg/theory", "embracingfl/theory")
    found = reproduce(names, tmp_path)

    assert [each.entry for each in found] == list(names)
    for summary in found:
        folder = tmp_path / summary.entry
        assert summary.claims and not summary.broken
        assert json.loads((folder / "results.json").read_bytes())["entry"] == summary.entry
        page = (folder / "README.md").read_text()
        assert summary.command in page
        for picture in folder.glob("*.svg"):
            assert f"({picture.name})" in page
            assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    overview = (tmp_path / "README.md").read_text()
    assert all(name in overview for name in names)
