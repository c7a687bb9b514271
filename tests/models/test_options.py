"""Options of kinds and algorithms: wrong names and types are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl import algorithms
from edgefl.errors import ConfigError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("importance", {"min_keep": "8"}),
        ("importance", {"strategy": "tensor"}),
        ("importance", {"shards": [["stem", 3]]}),
        ("width", {"ratio": "x"}),
        ("width", {"gamma": 0.25, "rolling": "no"}),
        ("width", {"gamma": 0.25, "ordered": True, "widths": "ab"}),
        ("output_side", {"cut": 1.5}),
    ],
)
def test_an_option_of_a_kind_of_another_type_is_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"option '\w+' of submodel kind"):
        catalog.build(build_model("mlp"), kind, **options)


@pytest.mark.parametrize("options", [{"steps": "ten"}, {"eval_batch": "x"}, {"remask": 1}])
def test_an_option_of_an_algorithm_of_another_type_is_refused(options: dict[str, Any]) -> None:
    objective = Objective(build_model("mlp").module, build_model("mlp").sample)
    with pytest.raises(ConfigError, match=r"option '\w+' of algorithm"):
        algorithms.build("tcbgd", objective, **options)


def test_whole_numbers_are_numbers_and_lists_are_sequences() -> None:
    assert catalog.build(build_model("mlp"), "importance", gamma=1, dense=["head"]).kind == "importance"
    assert catalog.build(build_model("mlp"), "width", ratio=1).kind == "width"
