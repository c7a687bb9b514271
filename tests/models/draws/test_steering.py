"""Code whose branches ask for chance or for a mask's values becomes one path, the same in every step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.draws.steering import Steered
from edgefl.models.layers.visible import visible
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.programs.baselines.sgd import sgd
from edgefl.wire.errors import ModelError
from exporters.capture.trace import capture

ROWS = TensorSpec((6,))


class LayerDrop(nn.Module):
    """Layers of which one is left out now and then, as Wav2Vec2 does."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(3))
        self.head, self.rate = nn.Linear(6, 4), rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.rate > 0.0:
                chance = torch.rand([])
                if chance < self.rate:
                    continue
            x = torch.tanh(layer(x))
        return self.head(x)


class Masked(nn.Module):
    """Applies its mask only where it hides something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, hides: Tensor) -> Tensor:
        x = self.first(x)
        if not hides.bool().all():
            x = x * hides
        return self.second(torch.tanh(x))


def _step(model: nn.Module, sample: TensorSpec | dict[str, TensorSpec] = ROWS) -> Objective:
    spec = split(model, sample=sample, classes=4)
    return Objective(spec.module, spec.sample)


def test_a_layer_that_is_left_out_by_chance_is_always_there_and_people_are_told() -> None:
    torch.manual_seed(0)
    model, x = LayerDrop(), torch.randn(3, 6)
    with pytest.warns(UserWarning, match=r"steers Python \(at .*test_steering\.py:\d+\).*condition is False"):
        spec = split(model, sample=ROWS, classes=4)
        captured = capture(sgd(Objective(spec.module, spec.sample), batch=3).phases[0].function)

    assert len(spec.units) == 4
    assert sum(name.startswith("noise.") for name in captured.inputs) == 3
    assert sum(name.startswith("state.weights.") and name.endswith("weight") for name in captured.inputs) == 4
    assert torch.equal(spec.module.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    "unlikely",
    [
        lambda drawn: drawn < 0.1,
        lambda drawn: drawn > 0.9,
        lambda drawn: drawn <= 0.3,
        lambda drawn: drawn >= 0.7,
        lambda drawn: torch.lt(drawn, 0.2),
    ],
)
@pytest.mark.filterwarnings("ignore:a random number steers Python")
def test_the_likelier_branch_is_taken(unlikely: Callable[[Tensor], Tensor]) -> None:
    for _ in range(20):
        with Steered():
            assert not unlikely(torch.rand(()))
            assert not unlikely(torch.rand(1))


@pytest.mark.parametrize("hidden", [True, False])
def test_a_mask_is_applied_where_its_values_are_not_known(hidden: bool) -> None:
    torch.manual_seed(0)
    model, x, hides = Masked(), torch.randn(3, 6), torch.ones(3, 6)
    hides[:, 4:] -= float(hidden)
    objective = _step(model, {"x": ROWS, "hides": ROWS})
    step = sgd(objective, batch=3).phases[0].function
    given = step.example(0) | {"batch.0.x": x, "batch.0.hides": hides}

    captured = capture(step)
    assert "batch.0.hides" in captured.inputs
    torch.testing.assert_close(captured(given), step(given))


def test_a_mask_with_values_at_hand_is_asked() -> None:
    with Steered():
        assert torch.ones(3, dtype=torch.bool).all()
        assert not torch.tensor([True, False]).all()


def _python() -> float:
    return random.random()


def _numpy() -> float:
    return float(np.random.rand())


def test_numbers_of_python_and_numpy_are_refused() -> None:
    class Python(nn.Module):
        def __init__(self, draw: object) -> None:
            super().__init__()
            self.layer, self.draw = nn.Linear(6, 4), draw

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.draw() if self.training else x)  # type: ignore[operator]

    for draw in (_python, _numpy):
        objective = _step(nn.Sequential(Python(draw)))
        with pytest.raises(ModelError, match=r"Python's or numpy's generator.*torch\.rand"):
            objective.noise(3)


def test_spec_augment_is_switched_off_in_the_copy_and_people_are_told() -> None:
    class Config:
        apply_spec_augment, mask_time_prob, mask_feature_prob = True, 0.05, 0.0

    model = nn.Sequential(nn.Linear(6, 4))
    model.config = Config()
    with pytest.warns(UserWarning, match="SpecAugment of Sequential is off"):
        made = visible(model)

    assert not made.config.apply_spec_augment and model.config.apply_spec_augment
    made.config.mask_time_prob = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        visible(made)
