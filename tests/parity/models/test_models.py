"""Every model of the zoo, every tier: the exported step beside torch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edgefl import algorithms
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide, tiers
from tests.pairs import in_both, in_turn, pairs, slow
from tests.parity.forms import checked

TIERS = ("strong", "moderate", "weak")

# As many units as by default, so that the preset tiers fit, but few and narrow channels.
SMALL: Mapping[str, Mapping[str, object]] = {
    "bert": {"length": 6, "vocabulary": 20, "width": 12},
    "convnext": {"size": 16, "widths": (4, 6, 8, 10)},
    "lstm_lm": {"length": 5, "vocabulary": 20, "features": 6, "hidden": 5},
    "mobilenet": {"size": 16, "width": 0.1},
    "resnet18": {"size": 16, "widths": (4, 6, 8, 10)},
    "vit": {"size": 8, "width": 12},
}


@pytest.mark.parametrize(
    ("model", "tier", "form"),
    in_turn(
        [],
        rare=[
            ("cnn", "strong"),
            ("cnn", "moderate"),
            ("cnn", "weak"),
            ("resnet20", "strong"),
            ("resnet8", "weak"),
        ],
    ),
)
def test_the_exported_step_of_each_tier_equals_torch(model: str, tier: str, form: str) -> None:
    submodel = tiers(model)[tier].of(build_model(model))

    assert _worst_error(form, submodel) <= 1e-4


@pytest.mark.parametrize(
    ("model", "tier", "form"),
    [
        *[
            slow(*row)
            for row in pairs(
                ["bert", "convnext", "lstm_lm", "resnet18", "vit"], TIERS, ("onnx", "executorch")
            )
        ],
        slow("mobilenet", "strong", "onnx"),
    ],
)
def test_the_exported_step_of_a_small_sibling_equals_torch(model: str, tier: str, form: str) -> None:
    submodel = tiers(model)[tier].of(build_model(model, **SMALL[model]))

    assert _worst_error(form, submodel) <= 1e-4


@pytest.mark.parametrize("form", in_turn([()]))
def test_the_exported_step_of_a_transformer_s_last_block_equals_torch(form: str) -> None:
    spec = build_model("vit", size=8, width=12, depth=2)

    assert _worst_error(form, OutputSide(spec, len(spec.units) - 2)) <= 1e-4


@pytest.mark.parametrize(("cut", "form"), [row for cut in (0, 1, 2) for row in in_both(cut)])
def test_the_exported_step_of_the_mlp_equals_torch(cut: int, form: str) -> None:
    assert _worst_error(form, OutputSide(build_model("mlp"), cut)) <= 1e-4


@pytest.mark.parametrize(
    ("model", "cut", "form"),
    in_turn(
        [("elu_mlp", 0)],
        rare=[
            ("elu_mlp", 2),
            ("fafed_mnist", 0),
            ("fafed_fashion", 2),
            ("fafed_cifar", 0),
            ("fafed_mnist", 2),
        ],
    ),
)
def test_the_exported_step_of_federated_papers_models(model: str, cut: int, form: str) -> None:
    assert _worst_error(form, OutputSide(build_model(model), cut)) <= 1e-4


def _worst_error(form: str, submodel: OutputSide, batch: int = 8) -> float:
    """Largest error over loss, weights, momentum (the gradients) and statistics after one step, relative."""
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=batch)
    step = algorithm.phases[0].function
    return checked(form, step, 7).worst
