"""A model that looks at its samples again at its end, as classifiers of decoders do, is cut by its layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.inputs import call_with_inputs
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.support.gradients import assert_trains_as_torch

WORDS, LENGTH, WIDTH, CLASSES = 11, 6, 8, 3
IDS = TensorSpec((LENGTH,), torch.int64, WORDS)


class Mixed(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.across = nn.Linear(WIDTH, WIDTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.across(self.inside(x).tanh().transpose(1, 2)).transpose(1, 2)


class Last(nn.Module):
    """The logits at the last word that is no padding (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Mixed(), Mixed(), Mixed()])
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.score(x)
        place = torch.arange(ids.shape[1], device=ids.device) * (ids != 0)
        return logits[torch.arange(ids.shape[0], device=ids.device), place.argmax(-1)]


def last() -> Last:
    torch.manual_seed(0)
    return Last()


def spec_of(module: nn.Module) -> ModelSpec:
    return split(module, sample=IDS, classes=CLASSES)


def texts(rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    return torch.randint(1, WORDS, (rows, LENGTH), generator=generator) * (torch.arange(LENGTH) < lengths)


def test_it_is_cut_by_its_layers_and_the_last_unit_reads_the_sample() -> None:
    spec = spec_of(last())

    assert spec.units == ("words", "blocks_0", "blocks_1", "blocks_2", "score")
    assert not spec.others  # nothing that data have to bring
    objectives = [Objective.of(OutputSide(spec, cut)) for cut in range(5)]
    assert [list(each.others(2)) for each in objectives] == [["sample"]] * 5
    assert objectives[3].others(2)["sample"] == IDS.rows(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [0, 3])
def test_its_gradient_is_that_of_the_module(cut: int) -> None:
    module, x = last(), texts()
    spec, y = spec_of(module), torch.tensor([0, 1, 2, 0, 1])
    batch = {"x": call_with_inputs(spec.part(0, cut), {"x": x}), "sample": x, "y": y}

    found, _ = assert_trains_as_torch(module, spec, nn.functional.cross_entropy(module(x), y), batch, cut)

    assert len(found) == (15, 6)[cut == 3]


def test_a_sum_with_the_sample_stays_in_one_unit() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c((x + self.b(self.a(x).relu())).relu()).relu())

    assert split(Residual(), sample=TensorSpec((4,)), classes=4).units == ("a", "c", "d")
