"""What a catalogue calls a scalar of the task, or the server's, is not in what devices compute with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgefl import algorithms
from edgefl.contract.algorithm import Algorithm
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tools.facts import scalars_of, server_options_of

CASES = [
    ("fafed", {"lr": 0.5}),
    ("fafed", {"alpha": 0.7, "schedule": "decaying", "w": 2.0}),
    ("fafed", {"first_step": "plain"}),
    ("fafed", {"schedule": "theory", "smoothness": 2.0, "devices": 8, "h": 0.1}),
    ("stem", {"lr": 0.5, "alpha": 0.7, "schedule": "original", "c": 2.0, "sigma": 3.0}),
    ("stem", {"schedule": "decaying", "decay_unit": "epoch", "epoch_steps": 2}),
    ("per_fedavg", {"schedule": "diminishing"}),
    ("scaffold", {"eta_g": 0.5}),
    ("mimeadam", {"beta2": 0.5}),
    ("mimelite", {"beta2": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_announced_or_the_servers_changes_no_function(name: str, options: dict[str, Any]) -> None:
    objective = Objective.of(OutputSide(build_model("mlp", size=4, hidden=[3]), 0))
    usual, other = (algorithms.build(name, objective, batch=2, steps=2, **chosen) for chosen in ({}, options))

    assert options.keys() <= scalars_of(other) | server_options_of(other)
    for mine, its in zip(_functions(usual), _functions(other), strict=True):
        assert mine.inputs == its.inputs
        expected, results = (each(each.example(seed=3)) for each in (mine, its))
        assert expected.keys() == results.keys()
        assert all(torch.equal(expected[key], results[key]) for key in expected)


def _functions(algorithm: Algorithm) -> list[Any]:
    return [function for exchange in algorithm.exchanges for function in exchange.functions]
