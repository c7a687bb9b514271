"""Tensors outside of a model's state: constants of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import edgefl


class Projected(nn.Module):
    """A fixed random projection of more entries than a constant of an algorithm may have."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        table = torch.randn(8, 640, generator=torch.Generator().manual_seed(0))
        self.tables = (table,)
        if not hidden:
            self.register_buffer("table", table, persistent=False)
        self.hidden, self.head = hidden, nn.Linear(640, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = self.tables[0] if self.hidden else self.get_buffer("table")
        out: Tensor = self.head(torch.tanh(x @ table))
        return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_large_tensor_outside_of_the_state_is_a_constant(hidden: bool) -> None:
    module = Projected(hidden=hidden)
    bundle = edgefl.compile(
        edgefl.Model(module, sample=(8,), classes=3),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=2, steps=1)),
    )

    assert bundle.verify().ok
