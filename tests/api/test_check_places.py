"""What stands in a model's way is told with the line of its own code, and never with one of edgefl's."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import edgefl


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)


class Takes(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * x.max().item())  # here


class Chooses(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x[x[:, 0] > 0])  # here


class Jitters(Two):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * random.random()  # here
        return self.b(self.a(x))


class Widens(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.double()))  # here


class Shuffles(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            x = x[torch.randperm(x.shape[0])]  # here
        return self.b(x)


def marked(model: type[nn.Module]) -> int:
    lines, first = inspect.getsourcelines(model)
    return first + next(place for place, line in enumerate(lines) if "# here" in line)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Takes, "it asks for the values of a tensor"),
        (Chooses, "it asks for the values of a tensor"),
        (Jitters, "draws by Python's or numpy's generator while it trains"),
        (Widens, "Double and Float"),
        (Shuffles, "draws random numbers; make them of torch.rand"),
    ],
)
def test_the_line_is_the_user_s(model: type[nn.Module], text: str) -> None:
    told = str(edgefl.check(edgefl.Model(model(), sample=(4,), classes=3), engines=["onnx"], batch=2))

    assert text in told
    assert f"at {__file__}:{marked(model)}" in told


@pytest.mark.slow
def test_where_only_layers_of_torch_run_the_layer_is_named() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(1), nn.Upsample(4, mode="nearest-exact"), nn.Flatten(), nn.Linear(16, 3)
    )
    told = str(edgefl.check(edgefl.Model(model, sample=(1, 3, 3), classes=3), engines=["onnx"], batch=2))

    assert "has no ONNX form (in the gradient of what is called, in module 1 (Upsample))" in told
    assert str(Path(edgefl.__file__).parent) not in told
