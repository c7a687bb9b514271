"""Generated modules: a sample of ``make fuzz-modules``, and the generator itself."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given

from tests.support import fuzz
from tests.support.case import Case, batches
from tests.support.modules import cases, generated
from tests.support.oracle import judge, named_tensors, train_torch

COMPILED = 4


@pytest.mark.skipif(
    importlib.util.find_spec(fuzz.COMPARISON) is None, reason="this version has no comparison of its own"
)
@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_edgefl_trains_generated_modules_as_they_came(count: int) -> None:
    outcomes = {seed: fuzz.compared(seed) for seed in range(count)}

    assert {seed: each for seed, each in outcomes.items() if each.word == "raised"} == {}
    assert sum(each.word == "agrees" for each in outcomes.values()) >= 0.95 * count, outcomes


def test_a_bias_whose_gradient_is_rounding_alone_is_no_difference() -> None:
    """Seed 764 has a bias in front of batch norm, behind which the gradients of the model are small."""
    assert fuzz.compared(764).word == "agrees"


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(COMPILED))
def test_a_generated_module_trains_on_the_engine_like_torch(seed: int) -> None:
    outcome = judge(generated(seed))

    assert outcome.word in ("agrees", "refused", "undecided"), outcome


@given(cases())
def test_a_composed_module_is_made_alike_twice_and_trains_in_torch(case: Case) -> None:
    first, second = case.make(), case.make()
    trained = train_torch(case, batches(case, 2, 4), 0.05)

    assert [(name, part.training) for name, part in first.named_modules()] == [
        (name, part.training) for name, part in second.named_modules()
    ]
    for name, each in named_tensors(first).items():
        assert torch.equal(each, named_tensors(second)[name])
    assert any(not torch.equal(each, trained.before[name]) for name, each in trained.after.items())


def test_a_seed_names_one_module() -> None:
    assert str(generated(3).make()) == str(generated(3).make())
    assert len({str(generated(seed).make()) for seed in range(30)}) == 30
