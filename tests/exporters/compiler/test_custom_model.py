"""A branchy module and a list of cuts, as a user's factory returns them: every graph of every cut equals torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from edgefl.models.copies import trainable_copy
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.output_side.submodel import OutputSide
from tests.pairs import by_default
from tests.parity.rounds import exported

SAMPLE = [3, 8, 8]


class Residual(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(inside, width, 1) if inside != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


class Net(nn.Module):
    """Branches inside the blocks, functions between them, and a tail of pooling, flatten, dropout and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 6))
        self.layer2 = Residual(6, 8)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.flatten = nn.Flatten()
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu(self.stem(x))))
        return self.head(self.drop(self.flatten(self.pool(x))))


def branchy() -> tuple[nn.Module, Sequence[str]]:
    return Net(), ["stem", "layer1.0", "layer1", "layer2"]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return build_model(f"{__name__}:branchy", sample_shape=SAMPLE, classes=5)


def test_it_becomes_units_that_compute_the_same(spec: ModelSpec) -> None:
    assert spec.units == ("stem", "layer1_0", "layer1", "layer2", "tail")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = trainable_copy(Net()).eval()
    x = torch.rand(2, *SAMPLE)
    assert torch.equal(spec.module.eval()(x), whole(x))


@pytest.mark.parametrize("cut", by_default(range(5), [4]))
def test_all_graphs_of_each_cut_are_exported_and_verified(spec: ModelSpec, cut: int) -> None:
    # Building a bundle runs each graph in onnxruntime beside torch and checks how they fit together.
    made = exported(OutputSide(spec, cut, min(cut, 2) or 1), batch=4, steps=2, lr=0.1)

    manifest = made.bundle.manifest
    assert [graph.name for graph in manifest.graphs if graph.name.startswith("forward")] == [
        f"forward.{number}" for number in range(1, min(cut, 2) + 1)
    ]
    assert manifest.suffix == spec.units[cut:]
    assert {graph.name for graph in manifest.graphs} >= {"start", "train", "finish", "evaluate"}
