"""Helpers of the corpus: seeded cases from plain functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from tests.support.case import ROW, Case, Expected

SEQUENCE = TensorSpec((5, 8))
IMAGE = TensorSpec((3, 8, 8))
TOKENS = TensorSpec((6,), torch.int64, below=11)


class Collection:
    """Cases of one file; ``kind`` is a decorator's argument."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def case(
        self, kind: str, expected: Expected = "trains", sample: Any = ROW, **options: Any
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        """Add a function or class that makes a module as a case of its name; torch is seeded before each call."""

        def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            def seeded() -> nn.Module:
                torch.manual_seed(0)
                return make()

            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", make.__name__).lower()
            self.cases.append(Case(name, kind, expected, seeded, sample, **options))
            return make

        return add


class Rec(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, rnn: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


class Net(nn.Module):
    """Two layers with a part between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, 8), between or nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.between(self.a(x)))


class TwoLayers(nn.Module):
    """Two layers that ``forward`` of a subclass puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
