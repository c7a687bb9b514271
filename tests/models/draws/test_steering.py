"""Code whose branches ask for chance or for a mask's values becomes one path, the same in every step."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import trainable_copy
from edgefl.models.split import split
from edgefl.models.torch_functions.control_flow import TraceableMode, disable_masking
from edgefl.objective.objective import Objective
from edgefl_export.capture.trace import capture
from tests.pairs import slow
from tests.support.errors import ModelError, refuses

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


def test_a_layer_left_out_by_chance_stays_with_a_warning() -> None:
    torch.manual_seed(0)
    model, x = LayerDrop(), torch.randn(3, 6)
    with pytest.warns(UserWarning, match=r"steers Python \(at .*test_steering\.py:\d+\).*condition is False"):
        spec = split(model, sample=ROWS, classes=4)
        captured = capture(sgd(Objective(spec.module, spec.sample), batch=3).phases[0].function)

    assert len(spec.units) == 4
    assert sum(name.startswith("noise.") for name in captured.inputs) == 3
    assert sum(name.startswith("state.weights.") and name.endswith("weight") for name in captured.inputs) == 4
    assert torch.equal(spec.module.eval()(x), model.eval()(x))


@pytest.mark.sample(2)
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
        with TraceableMode():
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
    with TraceableMode():
        assert torch.ones(3, dtype=torch.bool).all()
        assert not torch.tensor([True, False]).all()


@pytest.mark.parametrize(
    "computed",
    [
        lambda c: torch.tensor([math.cos(c), -math.sin(c)]),
        lambda c: -c,
        abs,
        lambda c: c**2,
        lambda c: c % 1,
        lambda c: [1, 2, 3][c],
        lambda c: "yes" if c else "no",
        lambda c: c == 0.5,
        lambda c: torch.ones(3) * c,
        lambda c: c * torch.ones(3),
        lambda c: np.ones(3) * c,
        lambda c: f"{c:.2f}",
        lambda c: F.interpolate(torch.ones(1, 1, 4, 4), scale_factor=(c, c)),
    ],
)
def test_nothing_but_comparisons_is_made_of_a_number_of_python_s(computed: Callable[[Any], object]) -> None:
    with TraceableMode(), refuses(ModelError, chance=True, refused=True):
        computed(2 * random.uniform(-0.3, 0.3) + np.float64(1))


def test_a_move_to_another_device_keeps_its_dtype_without_values() -> None:
    x = torch.ones(3, dtype=torch.int64, device="meta")
    with TraceableMode():
        assert x.to("cpu", torch.float32).dtype is torch.float32
        assert x.to(device="cpu", dtype=torch.float64).dtype is torch.float64
        assert x.cpu() is x


class Layers(nn.Module):
    """Blocks that are left out now and then, as Python's chance says."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.blocks, self.head, self.draw = (
            nn.ModuleList(nn.Linear(6, 6) for _ in "abc"),
            nn.Linear(6, 4),
            draw,
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and self.draw() < 0.3:
                continue
            x = x + block(x)
        return self.head(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "draw",
    ["1 - np.random.random()", *map(slow, ("random.random()", "np.random.rand()", "random.uniform(0, 1)"))],
)
def test_python_s_chance_takes_the_likelier_path_with_a_warning(draw: str) -> None:
    module, x = Layers(lambda: eval(draw)), torch.randn(5, 6)
    for _ in range(4):
        with pytest.warns(
            UserWarning, match=r"random number steers Python \(at .*test_steering\.py.*is False"
        ):
            spec = split(module, sample=ROWS, classes=4)
        torch.testing.assert_close(spec.module.train()(x), module.eval()(x))
        module.train()


def test_spec_augment_is_switched_off_in_the_copy_with_a_warning() -> None:
    class Config:
        apply_spec_augment, mask_time_prob, mask_feature_prob = True, 0.05, 0.0

    model = nn.Sequential(nn.Linear(6, 4))
    model.config = Config()
    with pytest.warns(UserWarning, match="SpecAugment of Sequential is off"):
        made = trainable_copy(model)
        disable_masking(made)

    assert not made.config.apply_spec_augment and model.config.apply_spec_augment
    made.config.mask_time_prob = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_masking(made)
