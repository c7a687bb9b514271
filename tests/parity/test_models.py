"""Every model of the zoo, every tier: the exported step beside torch, at the sizes of the paper."""

from __future__ import annotations

import pytest

from edgefl import programs
from edgefl.models import zoo
from edgefl.programs.objective import Objective
from edgefl.submodels.output_side import OutputSide, tiers
from exporters.capture import capture
from exporters.onnx import to_onnx
from exporters.verify import verify

CASES = [(model, tier) for model in ("resnet20", "resnet8", "cnn") for tier in ("strong", "moderate", "weak")]


@pytest.mark.parametrize(("model", "tier"), CASES)
def test_the_exported_step_of_each_tier_equals_torch(model: str, tier: str) -> None:
    submodel = tiers(model)[tier].of(zoo.build(model))

    assert _worst_error(submodel) <= 1e-4


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_exported_step_of_the_mlp_equals_torch(cut: int) -> None:
    assert _worst_error(OutputSide(zoo.build("mlp"), cut)) <= 1e-4


def _worst_error(submodel: OutputSide) -> float:
    """Largest error over loss, weights, momentum (the gradients) and statistics after one step, relative."""
    program = programs.build("sgd", Objective.of(submodel), batch=32)
    step = program.phases[0].function
    return verify(step, to_onnx(capture(step)), seed=3).worst
