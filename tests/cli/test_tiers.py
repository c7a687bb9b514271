"""Tiers in one line of the command line."""

from __future__ import annotations

import pytest

from edgefl.config import parse
from edgefl.setup.tiers import parse_tiers
from tests.support.errors import ConfigError, refuses


def test_presets_kinds_sizes_names_and_counts() -> None:
    tables = parse_tiers("strong, weak*3, half=width:1/4, importance:0.0625*2, output_side:1", "resnet8")
    assert tables == {
        "strong": {"cut": 0, "chunks": 1, "count": 1},
        "weak": {"cut": 3, "chunks": 2, "count": 3},
        "half": {"kind": "width", "gamma": 0.25, "count": 1},
        "importance": {"kind": "importance", "gamma": 0.0625, "count": 2},
        "output-side": {"cut": 1, "count": 1},
    }
    assert set(parse({"tiers": tables}, source="the test").tiers) == set(tables)


def test_full_is_the_whole_model() -> None:
    tables = parse_tiers("full,width:1/4,width:1/16", "a.module:model")
    assert list(tables) == ["full", "width", "width3"]
    assert tables["full"] == {"cut": 0, "count": 1}
    both = parse_tiers("importance_structured:1/4,importance_structured:1/16", "resnet8")
    assert [table["gamma"] for table in both.values()] == [1 / 4, 1 / 16]
    with pytest.raises(ConfigError, match="two tiers are called 'a'"):
        parse_tiers("a=width:1/4,a=width:1/16", "resnet8")


@pytest.mark.parametrize(
    "text", ["", "width:1/4:2", "a=b=c", "width:a quarter", "width:1/0", "output_side:1.5"]
)
def test_what_cannot_be_read_is_told_with_the_grammar_or_the_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"KIND\[:SIZE\]|share such as|number of frozen units"):
        parse_tiers(text, "resnet8")


def test_a_share_outside_its_range_is_refused() -> None:
    with refuses(ConfigError, kind="width", size="1.5"):
        parse({"tiers": parse_tiers("width:1.5", "resnet8")}, source="the test")


@pytest.mark.parametrize("text", ["weka", "weka*2", "thin=weka:1/4"])
def test_a_misspelt_tier_is_told_with_the_models_tiers_and_the_kinds(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no tier 'weka' of resnet8; there are full, strong, moderate, weak, and .*width"
    ):
        parse_tiers(text, "resnet8")
