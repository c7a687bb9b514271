"""Functions of torch in other functions: the same values and the same gradients."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.models.torch_functions.rules import bincount, cdist, one_hot

MODES = ("use_mm_for_euclid_dist_if_necessary", "donot_use_mm_for_euclid_dist")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", (0.0, 1.0, 2.0, 3.0, math.inf))
@pytest.mark.parametrize("rows", ((4,), (2, 4)), ids=str)
def test_distances_are_torchs_with_torchs_gradient(rows: tuple[int, ...], p: float, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(*rows, 3, generator=generator), torch.randn(5, 3, generator=generator)
    y[2] = x.reshape(-1, 3)[1]  # a distance of 0
    y[3] = x.reshape(-1, 3)[0] + torch.tensor([0.5, -0.5, 0.25])  # two largest entries
    leaves = [x.requires_grad_(), y.requires_grad_()]

    found, expected = cdist(x, y, p, mode), torch.cdist(x, y, p, mode)

    torch.testing.assert_close(found, expected)
    weights = torch.arange(found.numel(), dtype=found.dtype).reshape(found.shape) % 3 + 1
    if p:
        grads = [torch.autograd.grad((each * weights).sum(), leaves) for each in (found, expected)]
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("shape", ((), (4,), (2, 3)), ids=str)
def test_one_hot_is_torchs(shape: tuple[int, ...]) -> None:
    classes = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))

    assert torch.equal(one_hot(classes, 11), F.one_hot(classes, 11))
    assert one_hot(classes) is NotImplemented


def test_bincount_is_torchs_where_all_values_fit_and_shows_it_where_not() -> None:
    values, shares = torch.tensor([0, 2, 2, 1]), torch.tensor([0.5, 1.0, 2.0, 4.0])

    assert torch.equal(bincount(values, minlength=4), torch.bincount(values, minlength=4))
    assert torch.equal(bincount(values, shares, 4), torch.bincount(values, shares, 4))
    assert (bincount(values, minlength=2) < -1e9).all()
    assert bincount(values, shares, 2).isnan().all()


class Coded(nn.Module):
    """Classes as vectors of zeros and a one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.one_hot(x, 11).float())
        return scores if x.dim() == 1 else scores.mean(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ("onnx", "executorch"))
@pytest.mark.parametrize("shape", ((), (6,)), ids=str)
def test_one_hot_compiles(shape: tuple[int, ...], target: Literal["onnx", "executorch"]) -> None:
    sample = TensorSpec(shape, torch.int64, 11)

    assert edgefl.compile(
        edgefl.Model(Coded(), sample=sample, classes=3), options=edgefl.CompileOptions(target=target)
    ).manifest.graphs
