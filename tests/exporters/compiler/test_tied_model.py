"""A model of a user's with tied weights, from its file: bundles of each cut, verified, and a round from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.model import model_spec
from edgefl.wire.bundle.archive import read_bundle
from tests.pairs import slow

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.dense(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(F.linear(x, self.first.weight.t())))


def make():
    return Net()
"""
UNITS = ("first", "blocks_0", "blocks_1", "first_weight", "head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tied") / "tiedmodel.py"
    file.write_text(MODEL)
    return f"{file}:make"


def test_automatic_cuts_may_lie_between_the_uses(model: str) -> None:
    assert model_spec(model, sample=(1, 8, 8), classes=10).units == UNITS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "chunks", "units"),
    [
        slow(2, 2, (("first", "first_weight"), ("blocks_0",))),
        (4, 3, (("first", "blocks_0", "first_weight"), ("blocks_1",), ("first_weight",))),
    ],
)
def test_a_bundle_of_a_cut_between_them_is_verified_and_trains(
    model: str, cut: int, chunks: int, units: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    submodel = edgefl.submodels.OutputSide(cut=cut, chunks=chunks)
    made = edgefl.compile(
        model,
        data="digits",
        submodel=submodel,
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=4, steps=2)),
    )
    made.save(tmp_path / "weak.efl")

    read = edgefl.Bundle.load(tmp_path / "weak.efl")

    assert tuple(chunk.units for chunk in read_bundle(tmp_path / "weak.efl").manifest.prefix) == units
    assert read.verify().ok  # built again from what the manifest says
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (9, 1, 8, 8), np.uint8), rng.integers(0, 10, 9)
    weights = made.share(made.initial_weights())
    assert sum(name.endswith("first.weight") for name in weights) == 1
    update = edgefl.train_round(tmp_path / "weak.efl", weights, x, y, seed=7).update
    assert ("first_weight.first.weight" in update) == (cut < 4)
