"""State that a module keeps while it is traced does not reach the next run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl_export.capture.trace import capture

SAMPLE = TensorSpec((4,))


class Places(nn.Module):
    """Positions, by a length that is kept elsewhere; a pair of tables, in a list; a buffer that is made when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.length, self.pair, self.made = nn.Linear(4, 4), 0, (), []

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[1]:
            self.length = x.shape[1]
            self.place = self.fc.weight[0] * 2.0
            self.pair = (self.fc.weight[1] * 1.0, 3)
            self.made.append({"row": self.fc.bias * 1.0})
            self.register_buffer("angles", torch.arange(x.shape[1]) * 0.5, persistent=False)
        return torch.tanh(self.fc(x) + self.place + self.pair[0] + self.made[0]["row"] + self.angles)


class Biased(nn.Module):
    """A bias that is gathered once for inference, as LeViT and TinyViT do; positions of the last length, as ConViT has."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Parameter(torch.randn(6)), nn.Linear(4, 4)
        self.cache: dict[str, Tensor] = {}

    def _bias(self) -> Tensor:
        if self.training:
            return self.table[:4]
        if "bias" not in self.cache:
            self.cache["bias"] = self.table[:4] * 1.0
        return self.cache["bias"]

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "positions") or len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1]) * 0.5
        return torch.tanh(self.fc(x) + self._bias() + self.positions)


@pytest.mark.parametrize("held", [{}, {"by": {}}, [], [[]]], ids=str)
def test_what_is_put_into_a_container_that_was_there_is_taken_out(held: Any) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = held

        def forward(self, x: Tensor) -> Tensor:
            inner = next(
                iter(self.cache.values() if isinstance(self.cache, dict) else self.cache), self.cache
            )
            inner.append(x) if isinstance(inner, list) else inner.setdefault("b", x)
            return x

    module, before = Holds(), copy.deepcopy(held)
    with restored_state(module):
        module(torch.ones(2))
    assert module.cache == before


def test_a_key_goes_with_the_tensor_that_it_stands_for() -> None:
    spec = split(nn.Sequential(nn.Linear(4, 4), Places(), nn.Linear(4, 3)), "auto", sample=SAMPLE, classes=3)
    step = sgd(Objective(spec.module, spec.sample), batch=3)
    for function in (step.evaluate, step.phases[0].function):
        for seed in range(2):
            given = function.example(seed)
            torch.testing.assert_close(capture(function)(given), function(given))
            torch.testing.assert_close(function(given), capture(function)(given))
    for part in spec.module.modules():
        if isinstance(part, Places):
            assert (part.length, part.pair, part.made, part._buffers, hasattr(part, "place")) == (
                0,
                (),
                [],
                {},
                False,
            )
            assert not part._non_persistent_buffers_set


def test_an_exported_evaluation_reads_the_weights_that_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Biased(), nn.Linear(4, 3))
    spec = split(model, "auto", sample=SAMPLE, classes=3)
    evaluate = sgd(Objective(spec.module, spec.sample), batch=3).evaluate

    for seed in range(2):
        given = evaluate.example(seed)
        wanted = evaluate(given)
        torch.testing.assert_close(capture(evaluate)(given), wanted)
        torch.testing.assert_close(evaluate(given), wanted)
    assert not any(part.cache for part in spec.module.modules() if isinstance(part, Biased))
