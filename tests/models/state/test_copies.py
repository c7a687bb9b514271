"""What copies of cut units keep: notes of counters and hooks, attributes, and hooks of modules that fx traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from edgefl.comparison.compare import compare
from edgefl.models.copies import copy_module
from edgefl.models.counters import counter_dtypes
from edgefl.models.hooks import gradient_hooks
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from tests.comparison.test_compare import SAMPLE, Net, Warming, seeded

_KINDS: dict[str, dict[str, float]] = {
    "output_side": {"cut": 0},
    "width": {"ratio": 0.5},
    "importance_structured": {"gamma": 0.5},
}


class Looked(Warming):
    """A counter whose value has to be an integer: it chooses a row, or shifts bits."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 6)

    def between(self, h: Tensor) -> Tensor:
        self.steps.add_(1)
        out: Tensor = h * self.rows(self.steps.clamp(max=4)) + (self.steps & 1)
        return out


class Inner(nn.Module):
    """A counter, and a parameter whose hook stops its training."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(6))
        self.scale.register_hook(torch.zeros_like)


class Holding(Inner):
    """Reads both, its own and those of a part, in code that a cut opens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = Inner(), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.inner.steps.add_(1)
        warm = torch.clamp(self.steps * self.inner.steps / 10, max=1.0)
        out: Tensor = self.second(torch.tanh(self.first(x)) * self.scale * self.inner.scale * warm)
        return out


def traced_with_hooks() -> nn.Module:
    traced: Any = fx.symbolic_trace(Net())
    traced.factor = 3.0
    traced.register_forward_hook(lambda module, _args, out: out * module.factor)
    traced.first.weight.register_hook(torch.zeros_like)
    return nn.Sequential(traced)


def test_every_objective_keeps_hooks_and_counters() -> None:
    spec = split(seeded(Holding), sample=SAMPLE, classes=3)
    hooks, noted = gradient_hooks(spec.module).keys(), counter_dtypes(spec.module)

    for kind, options in _KINDS.items():
        objective = Objective.of(catalog.build(spec, kind, **options))
        assert gradient_hooks(objective.suffix).keys() == hooks
        assert counter_dtypes(objective.training_module) == noted

    assert len(hooks) == len(noted) == 2


@pytest.mark.parametrize("make", [Looked, traced_with_hooks])
def test_cut_units_train_as_torch_does(make: Callable[[], nn.Module]) -> None:
    compare(split(seeded(make), sample=SAMPLE, classes=3))


def test_a_copy_of_a_traced_module_computes_the_same() -> None:
    traced: Any = fx.symbolic_trace(Net())
    traced.register_buffer("factor", torch.tensor(3.0), persistent=False)
    traced.register_forward_pre_hook(lambda module, args: (args[0] * module.factor,))
    x = torch.ones(2, 4)

    made = copy_module(traced)
    traced.factor.zero_()

    assert made.state_dict().keys() == traced.state_dict().keys()
    assert not torch.equal(made(x), traced(x))
