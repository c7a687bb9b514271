"""Memory budgets of ExecuTorch programs: what is planned fits, and the numbers stay the same."""

from __future__ import annotations

import functools

import pytest

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.artifact import Artifact
from edgefl_export.compiler.compiler import target_of
from edgefl_export.executorch.program.write import LEAST_BYTES
from edgefl_export.memory.recompute import Budget


@functools.cache
def step() -> Function:
    objective = Objective.of(OutputSide(build_model("elu_mlp", size=2, hidden=(64, 64, 64)), 0))
    return algorithms.build("sgd", objective, batch=8192).phases[0].function


@functools.cache
def plain() -> Artifact:
    form = target_of("executorch")
    return form.emit(form.capture(step()))


def within(budget: Budget) -> Artifact:
    form = target_of("executorch")
    return form.emit(form.capture(step()), budget)


@pytest.mark.slow
def test_a_budget_that_the_program_keeps_anyway_changes_nothing() -> None:
    artifact = within(Budget(plain().planned_bytes))

    assert artifact.memory_budget == plain().planned_bytes
    assert artifact.model == plain().model


@pytest.mark.slow
def test_a_share_is_one_of_what_the_program_plans() -> None:
    artifact = within(Budget(0.97, relative=True))

    assert artifact.memory_budget == int(0.97 * plain().planned_bytes)
    assert artifact.planned_bytes <= artifact.memory_budget < plain().planned_bytes


@pytest.mark.slow
def test_a_step_with_less_memory_computes_what_torch_computes() -> None:
    artifact = within(Budget(0.97, relative=True))

    assert target_of("executorch").verify(step(), artifact.model, 1).worst < 1e-4


@pytest.mark.slow
def test_an_impossible_budget_is_refused_with_the_least() -> None:
    with pytest.raises(ExportError, match=r"does not fit a memory budget") as caught:
        within(Budget(LEAST_BYTES - 1024))

    smallest = int(caught.value.details["smallest"])  # type: ignore[call-overload]
    assert LEAST_BYTES < smallest < plain().planned_bytes
    assert within(Budget(smallest)).planned_bytes == smallest
